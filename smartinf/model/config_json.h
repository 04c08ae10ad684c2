// config.json, as Hugging Face's transformers write and read it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/model/architecture.h"

namespace smartinf::model {

/// Tokens that end a text.
struct EndTokens {
  std::vector<int64_t> tokens;
  std::string note;  // of those that the vocabulary does not have; empty: there are none
};

struct Config {
  Architecture architecture;
  std::optional<base::DataType> type;  // of the tensors in the files, where it says so
  EndTokens end;
  std::string remark;        // a part of it that training leaves out: dropout; empty: nothing
  std::string unknown_keys;  // which keys change nothing, and why; empty: there are none
};

/// Reads config.json as transformers does: keys that its class of this model_type does not know
/// change nothing. ignored: keys that the user knows to change nothing, which `option` names (for
/// messages, as `path` is). Errors: kCorrupt for what is no config.json or has a value that cannot
/// be; kUnsupported for another family, and for what transformers computes otherwise, by all of its
/// keys.
base::Result<Config> read_config(const std::string& text, const std::string& path,
                                 std::span<const std::string> ignored,
                                 std::string_view option = "--model.ignored_keys");

/// generation_config.json. Errors: kCorrupt.
base::Result<EndTokens> read_generation_config(const std::string& text, const std::string& path,
                                               uint32_t vocabulary);

/// The config.json of a model without one of its own (Family::kLlama). `eos_token` < 0: unknown.
std::string write_config(const Architecture& architecture, base::DataType type, int64_t eos_token);
/// The same text but for the type of the tensors. text: what read_config() accepted.
std::string with_type(const std::string& text, base::DataType type);

}  // namespace smartinf::model
