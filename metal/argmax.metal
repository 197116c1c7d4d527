// The first column of every row's largest value, so that a pass of greedy decoding reads one number per row back and not a vocabulary.
//
// Values rank by their bits: the same for every dtype and compiler, whether or not the GPU flushes denormals; -0 is 0. A NaN ranks above
// all and -inf below all, so the result says both: the first NaN's column with the top bit set, or all bits set for nothing above -inf.
// Nothing is rounded, so a row's result cannot depend on its company.
#include "common.h"

constant constexpr uint SIMDGROUPS = 8;
constant constexpr int NAN_RANK = 0x7fffffff;
constant constexpr int NO_RANK = -0x7fffffff;
constant constexpr uint NO_COLUMN = 0xffffffffu;

struct ArgmaxParams {
  uint rows, columns, row_stride;
  uint part, parts;  // columns of a threadgroup, threadgroups of a row
};

inline int rank_of(uint magnitude, bool negative, uint infinity) {
  if (magnitude > infinity) return NAN_RANK;
  if (negative && magnitude == infinity) return NO_RANK;
  return negative ? -int(magnitude) : int(magnitude);
}
inline int rank_of(float x) { return rank_of(as_type<uint>(x) & 0x7fffffffu, as_type<int>(x) < 0, 0x7f800000u); }
inline int rank_of(half x) { return rank_of(as_type<ushort>(x) & 0x7fffu, as_type<short>(x) < 0, 0x7c00u); }
IF_BFLOAT(inline int rank_of(bfloat x) { return rank_of(as_type<ushort>(x) & 0x7fffu, as_type<short>(x) < 0, 0x7f80u); })

// The best of a part of a row, as rank and column. A thread's columns ascend, so the first of equals stays.
//
// 248,320 bf16: 31 parts of 16 KB a row, 497 KB, 1.2 us at 400 GB/s, so a launch's latency for one row and 20 us for 16: c(4) is about
// 1.5, c(16) 5, beside a vocabulary matmul of 700 us. 16 registers, 64 bytes of threadgroup memory, full occupancy.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void argmax_parts(
    device const T *logits [[buffer(0)]],
    device int *ranks [[buffer(1)]],     // [rows, parts]
    device uint *columns [[buffer(2)]],  // [rows, parts]
    constant ArgmaxParams &p [[buffer(3)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup int best_ranks[SIMDGROUPS];
  threadgroup uint best_columns[SIMDGROUPS];
  device const T *row = logits + group.y * p.row_stride;
  const uint first = group.x * p.part, end = min(first + p.part, p.columns);
  int best = NO_RANK;
  uint column = NO_COLUMN;
  for (uint i = first + thread_index; i < end; i += SIMDGROUPS * 32) {
    const int rank = rank_of(row[i]);
    column = rank > best ? i : column;
    best = max(best, rank);
  }
  const int top = simd_max(best);
  column = simd_min(best == top ? column : NO_COLUMN);
  if (lane == 0) {
    best_ranks[simdgroup] = top;
    best_columns[simdgroup] = column;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index > 0) return;
  best = NO_RANK;
  for (uint s = 0; s < SIMDGROUPS; s++) best = max(best, best_ranks[s]);
  column = NO_COLUMN;
  for (uint s = 0; s < SIMDGROUPS; s++) column = best_ranks[s] == best ? min(column, best_columns[s]) : column;
  ranks[group.y * p.parts + group.x] = best;
  columns[group.y * p.parts + group.x] = column;
}

// The best of a row's parts: a simdgroup takes a row, 4 rows a threadgroup. 250 bytes a row; nothing but a launch.
[[kernel]] void argmax_merge(
    device const int *ranks [[buffer(0)]], device const uint *columns [[buffer(1)]], device uint *best [[buffer(2)]],
    constant ArgmaxParams &p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint row = group * 4 + simdgroup;
  if (row >= p.rows) return;
  int rank = NO_RANK;
  uint column = NO_COLUMN;
  for (uint part = lane; part < p.parts; part += 32) {
    const int other = ranks[row * p.parts + part];
    column = other > rank ? columns[row * p.parts + part] : column;
    rank = max(rank, other);
  }
  const int top = simd_max(rank);
  column = simd_min(rank == top ? column : NO_COLUMN);
  if (lane == 0) best[row] = top == NAN_RANK ? column | 0x80000000u : column;
}

INSTANCES("argmax_parts", argmax_parts)
