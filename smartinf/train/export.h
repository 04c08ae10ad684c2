// A run's weights as a folder that Hugging Face's transformers load: safetensors, config.json,
// generation_config.json, tokenizer.json. Needs no torch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/train/trainer.h"

namespace smartinf::train {

struct ExportOptions {
  std::string out;                           // folder; made, or empty; filled wholly or not at all
  std::optional<base::DataType> type;        // default: as the run trained
  uint64_t shard_bytes_max = 5'000'000'000;  // above it several files with an index
};

struct ExportSummary {
  base::StepNumber step = 0;
  uint64_t parameters = 0;
  std::vector<std::string> files;  // names in the folder
};

/// Master weights are read from the devices piece by piece and cast on the way: memory stays within
/// the engine's budget. Nothing on the devices changes.
/// Errors: kNotFound (no state there), kAlreadyExists (something is in the way), kBusy (the run is going
/// on), the devices'.
base::Result<ExportSummary> export_run(const Job& job, const ExportOptions& options);

}  // namespace smartinf::train
