// Mixture of experts: moe_route picks every row's experts and their shares, moe_combine adds the experts' outputs and the shared one's.
// Both work row by row, so a row's bits do not depend on its company.
#include "common.h"

struct MoeParams {
  uint rows, experts, top, hidden;
  uint logits_row, gates_row;  // strides of the router's logits and of the shared expert's gates
};

// Ranks as numbers do, -0 below 0; NaN counts as the least, as the CPU path has it.
inline int rank_of(float x) {
  if (isnan(x)) x = -INFINITY;
  const int bits = as_type<int>(x);
  return bits ^ int(uint(bits >> 31) >> 1);
}

// A simdgroup takes a row: each round finds the best expert that comes after the last one (equal ones by number), so nothing is marked.
// Shares are the softmax over the chosen ones, which is the softmax over all renormalised.
//
// 256 experts, top 8: 64 loads of 2 bytes a lane, all but the first 8 from the cache, and 16 sums over the simdgroup: 2 us of latency.
// A dozen registers, no threadgroup memory. 512 bytes a row in, 64 out: c(16) is 1, the launch costs more than the work.
// candle's softmax and sort would take four launches, and its sort is wrong above 1024 columns.
template <typename T>
[[kernel]] void moe_route(
    device const T *logits [[buffer(0)]], device uint *experts [[buffer(1)]], device float *shares [[buffer(2)]],
    constant MoeParams &p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint row = group * 4 + simd;
  if (row >= p.rows) return;
  device const T *own = logits + row * p.logits_row;
  int last_rank = 0;
  uint last = 0;
  float best = 0.0f, sum = 0.0f;
  for (uint k = 0; k < p.top; k++) {
    int top_rank = -2147483647 - 1;
    uint top = 0xffffffffu;
    for (uint e = lane; e < p.experts; e += 32) {
      const int rank = rank_of(float(own[e]));
      const bool open = k == 0 || rank < last_rank || (rank == last_rank && e > last);
      if (open && (rank > top_rank || top == 0xffffffffu)) {
        top_rank = rank;
        top = e;
      }
    }
    last_rank = simd_max(top_rank);
    last = simd_min(top_rank == last_rank ? top : 0xffffffffu);
    const float logit = float(own[last]), value = isnan(logit) ? -INFINITY : logit;
    if (k == 0) best = value;
    const float share = exp_f32(value - best);
    sum += share;
    if (lane == 0) {
      experts[row * p.top + k] = last;
      shares[row * p.top + k] = share;
    }
  }
  if (lane == 0) {
    for (uint k = 0; k < p.top; k++) shares[row * p.top + k] /= sum;
  }
}

// One element of a row: its experts' outputs, best first, then the shared expert's; f32, rounded once.
//
// Reads 2 * (top + 1) bytes an element and writes 2: hidden 2,048, top 8: 41 KB a row, 0.1 us at 400 GB/s. c(16) is 1.4 beside a launch.
// A few registers, no threadgroup memory, full occupancy; 2,048 threads a row.
template <typename T>
[[kernel]] void moe_combine(
    device const T *outs [[buffer(0)]],       // [rows, top, hidden]
    device const float *shares [[buffer(1)]], // [rows, top]
    device const T *shared [[buffer(2)]],     // [rows, hidden]
    device const T *gates [[buffer(3)]],      // [rows, 1]
    device T *y [[buffer(4)]], constant MoeParams &p [[buffer(5)]],
    uint2 id [[thread_position_in_grid]]) {
  const uint row = id.y;
  float sum = 0.0f;
  for (uint k = 0; k < p.top; k++) sum = fma(shares[row * p.top + k], float(outs[(row * p.top + k) * p.hidden + id.x]), sum);
  y[row * p.hidden + id.x] = T(fma(sigmoid_f32(float(gates[row * p.gates_row])), float(shared[row * p.hidden + id.x]), sum));
}

INSTANCES("moe_route", moe_route)
INSTANCES("moe_combine", moe_combine)
