// The flags of smartinf generate.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/serve/options.h"
#include "smartinf/train/generator.h"
#include "smartinf/train/sampling.h"

namespace smartinf::apps {

struct GenerateFlags {
  std::string from;
  std::vector<std::string> prompts;
  std::vector<std::string> prompt_tokens;
  std::string checkpoint;
  bool chat = false;
  uint64_t tokens = 128;
  uint64_t samples = 1;
  train::Sampling sampling;
  std::string memory;
  std::string accelerator_memory;
  std::string accelerator = "auto";
  uint32_t threads = 0;
  std::string type;
  std::vector<std::string> ignored_keys;
  bool json = false;
  // Of a batch.
  std::string batch;
  std::string out;
  uint64_t sequences = 64;
  double save_every_s = 60;
  bool fresh = false;
  bool keep = false;
  std::vector<std::string> cache;  // devices for keys and values; empty: in memory
  std::string cache_format;        // empty: that of the type
  std::string rated_endurance;     // of each drive of the cache; empty: the recipe's
  serve::RemoteOptions remote;
};

/// 0 for an empty text. flag: for the error.
base::Result<uint64_t> bytes_of(const char* flag, const std::string& text);

/// The model of a run or a folder, and the memory that it may take.
base::Result<train::GeneratorOptions> generator_options(const GenerateFlags& flags);

/// smartinf generate --batch; returns an exit code.
int run_batch(const GenerateFlags& flags);

}  // namespace smartinf::apps
