// Gated delta net (Yang et al., arXiv 2412.06464) in two launches: gated_delta_prepare makes what the recurrence takes of every row,
// gated_delta replays the tape's accepted rows, keeps that state, and goes on with the rows. Prefill is the same two launches over a
// chunk of rows: serial in rows, so any split of rows into calls gives the same bits, and the state stays in registers meanwhile.
#include "common.h"

struct GatedDeltaParams {
  uint rows, first, count;             // rows of the call; the chunk's first row and number of rows
  uint x_row, a_row, b_row, tape_row;  // strides of x, a, b and of the tape's x
  uint accepted, taps, end;            // accepted rows of the tape; the new window ends before row `end` of x
  uint key_heads, value_heads, key_dim, value_dim;
};

// log(1 + e^t) to 2 ulp; t > 20 is returned, as the CPU path does.
inline float softplus_f32(float t) {
  if (t > 20.0f) return t;
  const float u = exp_f32(t), w = 1.0f + u;
  // log(w) after Cephes' logf: w = 2^n m, sqrt(1/2) <= m < sqrt(2).
  const uint bits = as_type<uint>(w) - 0x3f3504f3u;
  const float n = float(int(bits) >> 23), m = as_type<float>((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f, z = m * m;
  float p = fma(m, 7.0376836292e-2f, -1.1514610310e-1f);
  p = fma(p, m, 1.1676998740e-1f);
  p = fma(p, m, -1.2420140846e-1f);
  p = fma(p, m, 1.4249322787e-1f);
  p = fma(p, m, -1.6668057665e-1f);
  p = fma(p, m, 2.0000714765e-1f);
  p = fma(p, m, -2.4999993993e-1f);
  p = fma(p, m, 3.3333331174e-1f);
  float log = fma(n, -2.12194440e-4f, p * m * z);
  log = fma(z, -0.5f, log);
  log = fma(n, 0.693359375f, m + log);
  // What the rounding of 1 + u lost.
  return log + (u - (w - 1.0f)) / w;
}

// A row's inputs before the convolution: x itself, before it the accepted rows of the tape, before them the window.
template <typename T>
struct History {
  device const T *x, *tape;
  device const float *window;  // [taps - 1, channels]
  uint x_row, tape_row, accepted, taps, channels;
  float at(int row, uint channel) const {
    if (row >= 0) return float(x[uint(row) * x_row + channel]);
    const uint back = uint(-row);
    if (back <= accepted) return float(tape[(accepted - back) * tape_row + channel]);
    return window[(taps - 1 - (back - accepted)) * channels + channel];
  }
};

// A simdgroup takes a unit of a row: a head of queries or of keys, 128 value channels, or the gates of 32 heads. Rows past the chunk are
// those of the new window.
//
// 8 registers of channels, no threadgroup memory, full occupancy; taps come from the cache, so a row moves its own 2 + 4 bytes a channel.
// 27B (10,240 channels): 61 KB a row, 0.15 us at 400 GB/s: the launch costs more up to some 30 rows, so c(16) is near 1.
// 32 key heads' and 48 value units and 2 of gates, 82 simdgroups a row: a GPU fills from 4 rows on.
template <typename T>
[[kernel]] void gated_delta_prepare(
    device const T *x [[buffer(0)]], device const T *a [[buffer(1)]], device const T *b [[buffer(2)]],
    device const float *conv [[buffer(3)]],  // [channels, taps]
    device const float *a_log [[buffer(4)]], device const float *dt_bias [[buffer(5)]],
    device const float *window [[buffer(6)]], device const T *tape [[buffer(7)]],
    device float *qkv [[buffer(8)]],         // [count, channels]
    device float *gates [[buffer(9)]],       // [count, 2, value_heads]: decay, beta
    device float *new_window [[buffer(10)]],
    constant GatedDeltaParams &p [[buffer(11)]],
    uint2 group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint values = p.value_heads * p.value_dim, keys = 2 * p.key_heads, value_units = (values + 127) / 128;
  const uint unit = group.x * 4 + simd, row = p.first + group.y;
  const History<T> history = {x, tape, window, p.x_row, p.tape_row, p.accepted, p.taps, keys * p.key_dim + values};
  if (unit >= keys + value_units) {
    const uint h = (unit - keys - value_units) * 32 + lane;
    if (h >= p.value_heads || group.y >= p.count) return;
    const float softplus = softplus_f32(float(a[row * p.a_row + h]) + dt_bias[h]);
    gates[group.y * 2 * p.value_heads + h] = exp_f32(-exp_f32(a_log[h]) * softplus);
    gates[(group.y * 2 + 1) * p.value_heads + h] = sigmoid_f32(float(b[row * p.b_row + h]));
    return;
  }
  const bool key = unit < keys;
  const uint start = key ? unit * p.key_dim : keys * p.key_dim + (unit - keys) * 128;
  const uint width = key ? p.key_dim : min(values - (unit - keys) * 128, 128u);
  if (group.y >= p.count) {
    const uint tap = group.y - p.count;
    for (uint c = lane; c < width; c += 32)
      new_window[tap * history.channels + start + c] = history.at(int(p.end + tap) - int(p.taps - 1), start + c);
    return;
  }
  float out[8], squares = 0.0f;
  for (uint i = 0; i < 8; i++) {
    const uint c = i * 32 + lane;
    float sum = 0.0f;
    if (c < width) {
      for (uint tap = 0; tap < p.taps; tap++)
        sum = fma(conv[(start + c) * p.taps + tap], history.at(int(row + tap) - int(p.taps - 1), start + c), sum);
    }
    out[i] = silu_f32(sum);  // of 0 is 0
    squares = fma(out[i], out[i], squares);
  }
  float scale = 1.0f;
  if (key) {
    squares = simd_sum(squares);
    scale = (unit < p.key_heads ? 1.0f / sqrt(float(p.key_dim)) : 1.0f) / sqrt(squares + 1e-6f);
  }
  for (uint i = 0; i < 8; i++) {
    const uint c = i * 32 + lane;
    if (c < width) qkv[group.y * history.channels + start + c] = out[i] * scale;
  }
}

constant constexpr uint VALUES = 4;

// One row through VALUES value lanes of a head's state: S = decay S + k delta, delta = beta (v - decay k.S).
template <uint N>
inline void step(thread float (&state)[VALUES][N], thread const float (&k)[N], thread const float (&v)[VALUES], float decay, float beta) {
  float memory[VALUES];
  for (uint j = 0; j < VALUES; j++) {
    memory[j] = 0.0f;
    for (uint i = 0; i < N; i++) memory[j] = fma(k[i], state[j][i], memory[j]);
  }
  for (uint j = 0; j < VALUES; j++) memory[j] = simd_sum(memory[j]);
  for (uint j = 0; j < VALUES; j++) {
    const float delta = fma(-decay, memory[j], v[j]) * beta;
    for (uint i = 0; i < N; i++) state[j][i] = fma(k[i], delta, state[j][i] * decay);
  }
}

// A simdgroup owns VALUES value lanes of a head: its threads hold N key lanes of each, 32 apart. The state is read once and written once.
//
// 27B (48 heads, 128 x 128): 3.1 MB of state in, 3.1 MB out: 16 us at 400 GB/s whatever M is; a row adds 41 KB (0.1 us) and 2 sums over the
// simdgroup, some 0.2 us of latency: c(2) = 1.01, c(8) = 1.1 (M - 1 replayed rows included). 48 layers: 0.8 ms of a 36 ms step (4 bits).
// 16 registers of state, 8 of q and k: full occupancy; 1,536 simdgroups. 2,048 rows of prefill take 0.4 ms a layer, its matmuls 200 ms.
template <typename T, uint N>
[[kernel, max_total_threads_per_threadgroup(128)]] void gated_delta(
    device const float *state [[buffer(0)]],       // [value_heads, value_dim, key_dim]
    device float *new_state [[buffer(1)]],         // may be state itself
    device const float *tape [[buffer(2)]],        // [accepted, channels] of an earlier gated_delta_prepare
    device const float *tape_gates [[buffer(3)]],
    device const float *qkv [[buffer(4)]], device const float *gates [[buffer(5)]],
    device T *y [[buffer(6)]],                     // [rows, value_heads, value_dim]
    constant GatedDeltaParams &p [[buffer(7)]],
    constant uint &commit [[buffer(8)]],           // 1: the new state is the one after the rows, 0: the one before them
    uint2 group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint head = group.y, first = (group.x * 4 + simd) * VALUES;
  if (first >= p.value_dim) return;
  const uint keys = p.key_heads * p.key_dim, channels = 2 * keys + p.value_heads * p.value_dim;
  const uint at_q = head / (p.value_heads / p.key_heads) * p.key_dim, at_v = 2 * keys + head * p.value_dim + first;
  const uint at_state = (head * p.value_dim + first) * p.key_dim;
  float own[VALUES][N];
  for (uint j = 0; j < VALUES; j++) {
    for (uint i = 0; i < N; i++) {
      const uint c = i * 32 + lane;
      own[j][i] = c < p.key_dim && first + j < p.value_dim ? state[at_state + j * p.key_dim + c] : 0.0f;
    }
  }
  const uint steps = p.accepted + p.count;
  for (uint r = 0; r <= steps; r++) {
    if (r == (commit ? steps : p.accepted)) {
      for (uint j = 0; j < VALUES; j++) {
        for (uint i = 0; i < N; i++) {
          const uint c = i * 32 + lane;
          if (c < p.key_dim && first + j < p.value_dim) new_state[at_state + j * p.key_dim + c] = own[j][i];
        }
      }
    }
    if (r == steps) break;
    const bool replay = r < p.accepted;
    const uint at = replay ? r : r - p.accepted;
    device const float *row = (replay ? tape : qkv) + at * channels;
    device const float *gate = (replay ? tape_gates : gates) + at * 2 * p.value_heads + head;
    float k[N], q[N], v[VALUES];
    for (uint i = 0; i < N; i++) {
      const uint c = i * 32 + lane;
      q[i] = c < p.key_dim ? row[at_q + c] : 0.0f;
      k[i] = c < p.key_dim ? row[keys + at_q + c] : 0.0f;
    }
    for (uint j = 0; j < VALUES; j++) v[j] = first + j < p.value_dim ? row[at_v + j] : 0.0f;
    step<N>(own, k, v, gate[0], gate[p.value_heads]);
    if (replay) continue;
    for (uint j = 0; j < VALUES; j++) {
      float out = 0.0f;
      for (uint i = 0; i < N; i++) out = fma(q[i], own[j][i], out);
      out = simd_sum(out);
      if (lane == 0 && first + j < p.value_dim) y[((p.first + at) * p.value_heads + head) * p.value_dim + first + j] = T(out);
    }
  }
}

INSTANCES("gated_delta_prepare", gated_delta_prepare)
// N: key lanes of a thread.
#define RECURRENCES(suffix, type) \
  INSTANCE("gated_delta_1_" suffix, gated_delta, type, 1) \
  INSTANCE("gated_delta_2_" suffix, gated_delta, type, 2) \
  INSTANCE("gated_delta_4_" suffix, gated_delta, type, 4) \
  INSTANCE("gated_delta_8_" suffix, gated_delta, type, 8)
RECURRENCES("f32", float)
RECURRENCES("f16", half)
IF_BFLOAT(RECURRENCES("bf16", bfloat))
