// Weights that are not trained, read from the model's own files as often as they are wanted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "smartinf/engine/weight_reader.h"
#include "smartinf/model/weight_files.h"

namespace smartinf::train {

/// Elements that are fetched at once: 8 MiB in bf16. Long enough for a drive, short enough that a
/// unit's pieces are read side by side.
inline constexpr uint64_t kFrozenPieceElements = uint64_t{4} << 20;

class FrozenFiles final : public engine::WeightFileSet {
 public:
  explicit FrozenFiles(model::WeightFiles files) : files_(std::move(files)) {}
  base::Status read(const plan::Subgroup& subgroup, base::DataType type,
                    std::byte* out) const override {
    return files_.read_as(type, subgroup.first, subgroup.count, out);
  }
  std::string path_of(const plan::Subgroup&) const override { return files_.folder(); }

 private:
  const model::WeightFiles files_;
};

/// Threads: one caller; threads of its own read.
class FrozenWeights final : public engine::WeightReader {
 public:
  /// elements: of the files' space.
  FrozenWeights(model::WeightFiles files, uint64_t elements)
      : WeightReader(elements, kFrozenPieceElements,
                     std::make_shared<const FrozenFiles>(std::move(files))) {}
};

}  // namespace smartinf::train
