// A run's weights as a folder that Hugging Face's transformers load: safetensors, config.json,
// generation_config.json, tokenizer.json. Needs no torch.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/reshard.h"
#include "smartinf/model/safetensors.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/trainer.h"

namespace smartinf::train {

struct ExportOptions {
  std::string out;                     // folder; made, or empty; filled wholly or not at all
  std::optional<base::DataType> type;  // default: of model.from, else as the run trained
  bool merge = false;  // adapters: into the model's own weights, which the folder then has
  uint64_t shard_bytes_max = 5'000'000'000;  // above it several files with an index
  engine::StateProgress progress;            // a failure it returns ends the export
};

struct ExportSummary {
  base::StepNumber step = 0;
  uint64_t parameters = 0;
  std::vector<std::string> files;  // names in the folder
  bool adapters = false;           // the folder has these, and not the model
};

/// Master weights are read from the devices piece by piece and cast on the way: memory stays within
/// the engine's budget. Nothing on the devices changes, which may be on a file system that cannot
/// be written to. The folder is made durable, then gets its name; an export that fails leaves
/// nothing.
/// Errors: kNotFound (no state there), kAlreadyExists (something is in the way), kBusy (the run is
/// going on), kInvalidArgument (data.tokenizer is none), kCancelled by `progress`, the devices'.
base::Result<ExportSummary> export_run(const Job& job, const ExportOptions& options);

/// A model on its way into a folder.
struct ModelContents {
  const plan::ParameterSpace& space;
  base::DataType type = base::DataType::kF32;  // of the files
  TextFiles texts;                             // config.json and the tokenizer's files
  std::string single_file;                     // the name of the one file; empty: as transformers'
  /// Hands over all elements of the space in order, in pieces of any size.
  std::function<base::Status(const std::function<base::Status(std::span<const float>)>& take)> read;
  /// Of a space that is kept in other tensors: these, and their bytes in order in place of `read`.
  std::vector<model::TensorInfo> tensors = {};
  std::function<base::Status(const std::function<base::Status(std::span<const std::byte>)>& take)>
      read_bytes = {};
};
/// Writes them as export_run() does and returns the files' names. Errors: kAlreadyExists, kIo,
/// those of contents.read.
base::Result<std::vector<std::string>> write_model_folder(const std::string& out,
                                                          ModelContents contents,
                                                          uint64_t shard_bytes_max);

enum class PartialExport : uint8_t {
  kForeign,   // not an export that was not completed, or something else is in it
  kInUse,     // a process is writing it
  kLeftover,  // of a process that is gone
};
/// Follows no link.
PartialExport look_at_partial_export(const std::string& folder);
/// Deletes a leftover. Errors: kBusy, kFailedPrecondition (it is none; nothing is deleted), kIo.
base::Status remove_partial_export(const std::string& folder);

}  // namespace smartinf::train
