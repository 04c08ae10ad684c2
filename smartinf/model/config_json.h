// config.json, as Hugging Face's transformers write and read it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/model/architecture.h"

namespace smartinf::model {

struct Config {
  Architecture architecture;
  std::optional<base::DataType> type;  // of the tensors in the files, where it says so
  int64_t eos_token = -1;              // < 0: not given
  std::string remark;                  // what is not done as it says: dropout; empty: nothing
};

/// ignored: keys that the user knows not to matter (model.ignored_keys). `path` is for messages.
/// Errors: kCorrupt for what is no config.json; kUnsupported for another family, and for a key that
/// changes what the model computes in a way that is not known here, by its name.
base::Result<Config> read_config(const std::string& text, const std::string& path,
                                 std::span<const std::string> ignored);

/// Of a model without a config.json of its own (Family::kLlama). `eos_token` < 0: unknown.
std::string write_config(const Architecture& architecture, base::DataType type, int64_t eos_token);
/// The same text but for the type of the tensors. text: what read_config() accepted.
std::string with_type(const std::string& text, base::DataType type);

}  // namespace smartinf::model
