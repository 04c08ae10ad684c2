// Options of `smartinf distill`: the recipe's [teacher], [student] and [distill] tables. No torch.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/status.h"
#include "smartinf/plan/block_stages.h"

namespace smartinf::train {

/// distill.loss: how far a block's output y is from the teacher's t, a mean over tokens. kMse:
/// |y - t|^2 / |t|^2. kCosine: 1 - cos(y, t). Both are 0 where y and t have the same bits.
enum class BlockLoss : uint8_t { kMse, kCosine };
inline constexpr std::array<std::string_view, 2> kBlockLossNames{"mse", "cosine"};
constexpr base::EnumNames enum_names(BlockLoss) { return kBlockLossNames; }

/// distill.inputs: what a block of the student gets in training. kTeacher: what the teacher's block
/// gets, so blocks are independent. kStudent: what the student's own trained blocks before it make.
enum class BlockInputs : uint8_t { kTeacher, kStudent };
inline constexpr std::array<std::string_view, 2> kBlockInputsNames{"teacher", "student"};
constexpr base::EnumNames enum_names(BlockInputs) { return kBlockInputsNames; }

struct DistillOptions {
  std::string teacher;   // teacher.from
  std::string student;   // student.from; empty: it is made of the teacher
  std::string prune;     // student.prune
  std::string quantise;  // student.quantise
  BlockLoss loss = BlockLoss::kMse;
  BlockInputs inputs = BlockInputs::kTeacher;
  uint32_t top_k = 64;       // logits of the teacher that the last block learns from; 0: none
  uint64_t whole_steps = 0;  // steps of the student as a whole, after its blocks
  std::string stages;        // distill.stages; empty: each rank has blocks of its own
};

/// Shares of each layer that stay.
struct Pruning {
  double ffn = 1;    // channels of the feed-forward part
  double heads = 1;  // groups of query heads with their head of keys and values
};
/// "ffn=0.5,heads=0.75", either or both. Errors: kInvalidArgument.
base::Result<Pruning> parse_pruning(std::string_view text);

/// student.quantise: matrices of the layers become integers of 4 bits.
struct Quantising {
  uint32_t group = 128;  // neighbouring weights of a row that share a scale
};
/// "int4" or "int4,group=64". Errors: kInvalidArgument.
base::Result<Quantising> parse_quantising(std::string_view text);

/// distill.stages: "3,2x2": three blocks on one rank, two on two ranks that share them. None: the
/// text is no such list, but a run's folder. seconds: 0.
std::optional<std::vector<plan::BlockStage>> parse_stages(std::string_view text);
std::string stages_text(std::span<const plan::BlockStage> stages);

/// What blocks cost, by the log of a run that has made some steps of each: medians.
struct MeasuredBlocks {
  std::vector<plan::BlockCost> blocks;
  uint64_t micro_batches = 1;  // of a step
};
/// Errors: kNotFound where the folder has no log; kFailedPrecondition where it lacks a block.
base::Result<MeasuredBlocks> measured_blocks(const std::string& run);

/// Ok, or what cannot work, by its key. Looks at no files.
base::Status validate(const DistillOptions& options);

}  // namespace smartinf::train
