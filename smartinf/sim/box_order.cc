#include "smartinf/sim/box_order.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

namespace smartinf::sim {
namespace {

std::vector<uint32_t> given_order(uint32_t boxes) {
  std::vector<uint32_t> order(boxes);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

/// Changes an order in one of five ways.
void move(std::vector<uint32_t>& order, std::mt19937_64& draw) {
  const uint64_t boxes = order.size();
  auto first = static_cast<int64_t>(draw() % boxes);
  auto second = static_cast<int64_t>(draw() % boxes);
  if (first > second) std::swap(first, second);
  const auto begin = order.begin();
  switch (draw() % 5) {
    case 0:
      std::swap(order[static_cast<size_t>(first)], order[static_cast<size_t>(second)]);
      break;
    case 1:
      std::reverse(begin + first, begin + second + 1);
      break;
    case 2:
      std::rotate(begin + first, begin + first + 1, begin + second + 1);
      break;
    case 3: {
      const auto middle =
          first + static_cast<int64_t>(draw() % static_cast<uint64_t>(second - first + 1));
      std::rotate(begin + first, begin + middle, begin + second + 1);
      break;
    }
    default:
      std::swap(order[static_cast<size_t>(first)],
                order[(static_cast<size_t>(first) + 1) % order.size()]);
  }
}

}  // namespace

std::vector<uint32_t> annealed_order(uint32_t boxes, const OrderCost& cost, uint64_t seed,
                                     uint32_t moves) {
  constexpr double kHot = 0.1;  // of the given order's cost: a rise that is often taken at first...
  constexpr double kCold = 1e-5;  // ...and at last
  std::mt19937_64 draw(seed);
  std::vector<uint32_t> now = given_order(boxes);
  std::vector<uint32_t> best = now;
  const double given = cost(now);
  double now_cost = given;
  double best_cost = given;
  for (uint32_t i = 0; i < moves && boxes > 1; ++i) {
    const double heat = given * kHot * std::pow(kCold / kHot, static_cast<double>(i) / moves);
    std::vector<uint32_t> next = now;
    move(next, draw);
    const double next_cost = cost(next);
    const double luck = static_cast<double>(draw() >> 11) * 0x1p-53;
    if (next_cost > now_cost && luck >= std::exp((now_cost - next_cost) / heat)) continue;
    now = std::move(next);
    now_cost = next_cost;
    if (now_cost >= best_cost) continue;
    best = now;
    best_cost = now_cost;
  }
  return best;
}

std::vector<uint32_t> best_order(uint32_t boxes, const OrderCost& cost, uint64_t seed,
                                 uint32_t moves) {
  if (boxes > kAllOrdersMax) return annealed_order(boxes, cost, seed, moves);
  std::vector<uint32_t> order = given_order(boxes);
  std::vector<uint32_t> best = order;
  double best_cost = cost(order);
  while (std::ranges::next_permutation(order).found) {
    const double of_order = cost(order);
    if (of_order >= best_cost) continue;
    best = order;
    best_cost = of_order;
  }
  return best;
}

}  // namespace smartinf::sim
