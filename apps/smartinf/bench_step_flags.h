// The flags of smartinf bench step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "smartinf/compress/message.h"
#include "smartinf/serve/options.h"

#include "apps/smartinf/format_flags.h"

namespace smartinf::apps {

struct StepOptions {
  double params = 2e8;
  std::vector<std::string> devices;
  uint32_t emulated = 0;  // so many devices in memory, in place of those
  double slow_device = 1;
  int repeat = 5;
  FormatFlags format;
  std::string rule = "adamw";
  std::string durability = "step";
  bool no_checksums = false;
  std::string where = "device";
  std::string schedule = "overlapped";
  std::string ring = "auto";
  std::string memory_budget = "512MiB";
  std::string state_cache = "0";
  std::string internal_read = "0";
  std::string internal_write = "0";
  std::string host_link = "0";
  std::string shared = "all";
  uint64_t subgroup = 0;
  std::string gradient;  // empty: bf16; f32 for a host update
  std::string weights = "bf16";
  bool spill = false;
  double density = 0;  // of compressed gradients; 0: dense ones
  std::optional<compress::ValueEncoding> values;
  bool error_feedback = true;
  uint64_t residual_every = 0;
  std::string io_bytes = "0";
  uint32_t io_depth = 0;
  uint32_t threads = 0;
  std::string processor = "cpu";
  std::string trace;
  std::string machine;
  bool keep = false;
  bool json = false;
  serve::RemoteOptions remote;
};

void add_step_flags(CLI::App& command, StepOptions& options);

}  // namespace smartinf::apps
