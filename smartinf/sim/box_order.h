// Order of a cluster's boxes: which of them has which ranks, and so which stages. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace smartinf::sim {

/// Seconds, or what else is to be small, of an order of boxes.
using OrderCost = std::function<double(std::span<const uint32_t>)>;

/// Boxes of which all orders are tried.
inline constexpr uint32_t kAllOrdersMax = 8;
/// Moves of a search among the orders of more; the same on every machine.
inline constexpr uint32_t kOrderMoves = 20'000;

/// The order of boxes 0 to boxes - 1 of least cost; of equal ones the first. Of more than
/// kAllOrdersMax by simulated annealing with five moves (swap two, reverse a part, move one, move a
/// part, swap neighbours), which begins at the given order, 0, 1, 2..., and returns the best that
/// it met. Source of the moves: Pipette (DATE 2024).
std::vector<uint32_t> best_order(uint32_t boxes, const OrderCost& cost, uint64_t seed = 0,
                                 uint32_t moves = kOrderMoves);
/// As best_order() for any number of boxes.
std::vector<uint32_t> annealed_order(uint32_t boxes, const OrderCost& cost, uint64_t seed = 0,
                                     uint32_t moves = kOrderMoves);

}  // namespace smartinf::sim
