// 8x8 simdgroup matrices: two elements a lane, in the layout that public kernels rely on (Apple does not document it).
// Products are summed in f32, in order of k, one fused multiply-add each. Included inside namespace msl::metal.
template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "simdgroup matrices are 8x8");
  vec<T, 2> emu_te;
  simdgroup_matrix() = default;
  EMU_INLINE explicit simdgroup_matrix(T diagonal, EMU_HERE) {
    uint r, c;
    place(r, c, at_);
    emu_te = vec<T, 2>(T(0));
    if (r == c) emu_te.x = diagonal;
    if (r == c + 1) emu_te.y = diagonal;
  }
  EMU_INLINE vec<T, 2> &thread_elements() { return emu_te; }
  EMU_INLINE const vec<T, 2> &thread_elements() const { return emu_te; }
  static EMU_INLINE void lane_place(uint lane, uint &r, uint &c) {
    uint q = lane / 4;
    r = (q & 4) + (lane / 2) % 4;
    c = (q & 2) * 2 + (lane % 2) * 2;
  }
  // In checked mode all lanes have to come here together; in fast mode nothing is exchanged, so nobody waits.
  static EMU_INLINE void place(uint &r, uint &c, emu_site at) {
#ifdef EMU_CHECKED
    auto l = emu_gather(0, "simdgroup matrix operation", at);
    if (l.active != 0xffffffffu) emu_fail(EMU_F_INACTIVE, "simdgroup matrix operation with inactive lanes", at);
    lane_place(l.lane, r, c);
#else
    lane_place(emu_self()->lane, r, c);
#endif
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int R, int C = R>
EMU_INLINE simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(emu_same_t<T> v) {
  simdgroup_matrix<T, R, C> m;
  m.emu_te = vec<T, 2>(v);
  return m;
}
template <class T, int R, int C>
EMU_INLINE void simdgroup_load(simdgroup_matrix<T, R, C> &d, const T *src, ulong ld = C, ulong2 origin = ulong2(0ul),
                               bool transpose = false, EMU_HERE) {
  uint r, c;
  d.place(r, c, at_);
  for (uint j = 0; j < 2; j++) {
    ulong y = transpose ? c + j : r, x = transpose ? r : c + j;
    d.emu_te[j] = src[(origin.y + y) * ld + origin.x + x];
  }
}
template <class T, int R, int C>
EMU_INLINE void simdgroup_store(const simdgroup_matrix<T, R, C> &d, T *dst, ulong ld = C, ulong2 origin = ulong2(0ul),
                                bool transpose = false, EMU_HERE) {
  uint r, c;
  d.place(r, c, at_);
  for (uint j = 0; j < 2; j++) {
    ulong y = transpose ? c + j : r, x = transpose ? r : c + j;
    dst[(origin.y + y) * ld + origin.x + x] = d.emu_te[j];
  }
}
struct emu_product {
  float a[8][8], b[8][8], c[8][8];
};
static_assert(sizeof(emu_product) <= sizeof(emu_bank::data), "");
template <class TD, class TA, class TB, class TC>
EMU_NOSAN inline void simdgroup_multiply_accumulate(simdgroup_matrix<TD, 8, 8> &d, const simdgroup_matrix<TA, 8, 8> &a,
                                                    const simdgroup_matrix<TB, 8, 8> &b,
                                                    const simdgroup_matrix<TC, 8, 8> &c, EMU_HERE) {
  emu_thread *t = emu_self();
  uint r, k;
  simdgroup_matrix<TD, 8, 8>::lane_place(t->lane, r, k);
  emu_product *p = (emu_product *)t->bank->data;
  for (uint j = 0; j < 2; j++) {
    p->a[r][k + j] = float(a.emu_te.emu_e[j]);
    p->b[r][k + j] = float(b.emu_te.emu_e[j]);
    p->c[r][k + j] = float(c.emu_te.emu_e[j]);
  }
  uint active = emu_simd_wait("simdgroup_multiply_accumulate", at_);
  if (active != 0xffffffffu) emu_fail(EMU_F_INACTIVE, "simdgroup_multiply_accumulate with inactive lanes", at_);
  emu_bank *bank = t->settled;
  const emu_product *q = (const emu_product *)bank->data;
  float(*out)[8] = (float(*)[8])bank->result;
  if (!bank->ready) {
    bank->ready = 1;
    for (uint y = 0; y < 8; y++) {
      float row[8];
      for (uint x = 0; x < 8; x++) row[x] = q->c[y][x];
      for (uint i = 0; i < 8; i++)
        for (uint x = 0; x < 8; x++) row[x] = __builtin_fmaf(q->a[y][i], q->b[i][x], row[x]);
      for (uint x = 0; x < 8; x++) out[y][x] = row[x];
    }
  }
  for (uint j = 0; j < 2; j++) d.emu_te.emu_e[j] = TD(out[r][k + j]);
}
template <class TD, class TA, class TB>
EMU_INLINE void simdgroup_multiply(simdgroup_matrix<TD, 8, 8> &d, const simdgroup_matrix<TA, 8, 8> &a,
                                   const simdgroup_matrix<TB, 8, 8> &b, EMU_HERE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<TD, 8, 8>(TD(0)), at_);
}
