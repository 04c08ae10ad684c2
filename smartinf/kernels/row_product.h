// Products of a matrix with few rows: what continuing several sequences by a token each consists
// of. The time is that of reading the matrix, which is read once for as many rows as there are.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/kernels/update.h"

namespace smartinf::kernels {

/// A matrix and what is added to its products, in memory that is the caller's.
struct RowMatrix {
  const void* weights = nullptr;                // [outputs][inputs]
  const void* bias = nullptr;                   // [outputs], or null
  base::DataType type = base::DataType::kBf16;  // of both: bf16 or f32
  size_t outputs = 0;
  size_t inputs = 0;
  bool transposed = false;  // weights are [inputs][outputs]
};

/// Rounds to the numbers that the type has, nearest, ties to even. type: bf16 or f32.
void round_to(base::DataType type, std::span<float> values);

/// Threads: one caller.
class RowProduct {
 public:
  /// team: outlives this. table: whose instruction set.
  explicit RowProduct(base::ThreadTeam& team, const KernelTable& table = kernels())
      : team_(team), table_(table) {}

  /// y = x W^T + bias, with sums in f32, rounded to the matrix's type. A row of y has the same bits
  /// alone and among others, at any place and with any number of threads; processors with other
  /// instructions may have others. Shapes: x: [rows][inputs]; y: [rows][outputs]. Errors: none at
  /// run time; other sizes are bugs (SI_CHECK).
  void run(const RowMatrix& matrix, std::span<const float> x, std::span<float> y);

 private:
  base::ThreadTeam& team_;
  const KernelTable& table_;
  std::vector<float> arranged_;
};

}  // namespace smartinf::kernels
