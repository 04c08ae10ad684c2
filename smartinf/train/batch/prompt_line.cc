#include "smartinf/train/batch/prompt_line.h"

#include <algorithm>
#include <array>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/checksum.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"

namespace smartinf::train {
namespace {

constexpr uint64_t kNewTokensMax = uint64_t{1} << 24;
constexpr size_t kStopsMax = 16;

/// As a message shows it.
std::string as_shown(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

/// Fields of a request that say what holds here anyway.
bool says_nothing(const std::string& name, const nlohmann::json& value) {
  if (value.is_null()) return true;
  if (name == "n" || name == "best_of") return value == 1;
  if (name == "stream" || name == "logprobs" || name == "echo") return value == false;
  if (name == "frequency_penalty" || name == "presence_penalty") return value == 0;
  return name == "user" && value.is_string();
}

class PromptReader {
 public:
  PromptReader(uint64_t number, const PromptDefaults& defaults) {
    line_.number = number;
    line_.id = std::to_string(number);
    line_.tokens_max = defaults.tokens;
    line_.sampling = defaults.sampling;
  }

  PromptLine read(std::string_view text) {
    if (text.size() > kPromptLineBytesMax) {
      fail(fmt::format("the line is longer than {}", base::format_bytes(kPromptLineBytesMax)));
    } else if (const nlohmann::json object = base::parse_json(text); object.is_discarded()) {
      fail("the line is no JSON");
    } else if (!object.is_object()) {
      fail("the line is no JSON object");
    } else if (std::ranges::any_of(kOfRequests,
                                   [&](const char* name) { return object.contains(name); })) {
      read_request(object);
    } else {
      read_plain(object);
    }
    if (line_.error.empty() && prompts_ != 1) {
      fail(prompts_ == 0 ? "there is no prompt" : "there is more than one prompt");
    }
    if (!seeded_) {
      const auto id = std::as_bytes(std::span(line_.id));
      line_.sampling.seed = base::mix_seed(line_.sampling.seed, base::checksum(id));
    }
    return std::move(line_);
  }

 private:
  static constexpr std::array<const char*, 4> kOfRequests{"custom_id", "method", "url", "body"};

  /// The first reason counts.
  void fail(std::string why) {
    if (line_.error.empty()) line_.error = std::move(why);
  }
  void wrong(const std::string& name, const nlohmann::json& value, std::string_view expected) {
    fail(fmt::format("{} is {}, and not {}", name, as_shown(value), expected));
  }
  void unknown(const std::string& name) { fail(fmt::format("unknown field: {}", name)); }

  void read_request(const nlohmann::json& object) {
    line_.form = PromptLine::Form::kChat;
    const nlohmann::json* body = nullptr;
    for (const auto& [name, value] : object.items()) {
      if (name == "custom_id") {
        value.is_string() && value != "" ? set_id(value) : wrong(name, value, "a text");
      } else if (name == "method") {
        if (value != "POST") wrong(name, value, "\"POST\"");
      } else if (name == "url") {
        if (value == "/v1/completions") {
          line_.form = PromptLine::Form::kCompletion;
        } else if (value != "/v1/chat/completions") {
          wrong(name, value, "\"/v1/chat/completions\" or \"/v1/completions\"");
        }
      } else if (name == "body") {
        body = &value;
        if (!value.is_object()) wrong(name, value, "an object");
      } else {
        unknown(name);
      }
    }
    for (const char* name : kOfRequests) {
      if (!object.contains(name)) fail(fmt::format("there is no {}", name));
    }
    if (!line_.error.empty()) return;
    for (const auto& [name, value] : body->items()) {
      const bool prompt = name == (line_.form == PromptLine::Form::kChat ? "messages" : "prompt");
      if (says_nothing(name, value)) continue;
      if (name == "model") {
        value.is_string() ? void(line_.model = value.get<std::string>())
                          : wrong(name, value, "a text");
      } else if (name == "max_completion_tokens") {
        read_field("max_tokens", value);
      } else if ((!prompt && (name == "messages" || name == "prompt" || name == "tokens")) ||
                 !read_field(name, value)) {
        unknown("body." + name);
      }
    }
  }

  void read_plain(const nlohmann::json& object) {
    for (const auto& [name, value] : object.items()) {
      if (value.is_null()) continue;
      if (name == "id") {
        if (value.is_string() || value.is_number_integer()) {
          set_id(value);
        } else {
          wrong(name, value, "a text or a whole number");
        }
      } else if (!read_field(name, value)) {
        unknown(name);
      }
    }
    if (!line_.tokens.empty() && !line_.stop.empty()) {
      fail("stop needs text, and the prompt is tokens");
    }
  }

  void set_id(const nlohmann::json& value) {
    line_.id = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }

  /// False for a field that is not known.
  bool read_field(const std::string& name, const nlohmann::json& value) {
    if (name == "prompt") {
      value.is_array() ? read_tokens(name, value) : read_text(name, value);
    } else if (name == "tokens") {
      read_tokens(name, value);
    } else if (name == "messages") {
      read_messages(value);
    } else if (name == "max_tokens") {
      read_whole(name, value, 1, kNewTokensMax, line_.tokens_max);
    } else if (name == "top_k") {
      uint64_t top_k = 0;
      read_whole(name, value, 0, std::numeric_limits<uint32_t>::max(), top_k);
      line_.sampling.top_k = static_cast<uint32_t>(top_k);
    } else if (name == "temperature") {
      read_number(name, value, line_.sampling.temperature);
      const double read = line_.sampling.temperature;
      if (!(read >= 0 && read <= 100)) wrong(name, value, "from 0 to 100");
    } else if (name == "top_p") {
      read_number(name, value, line_.sampling.top_p);
      const double read = line_.sampling.top_p;
      if (!(read > 0 && read <= 1)) wrong(name, value, "above 0 and up to 1");
    } else if (name == "seed") {
      seeded_ = value.is_number_integer();
      if (!seeded_) wrong(name, value, "a whole number");
      // A negative one as its bits.
      if (seeded_) line_.sampling.seed = value.get<uint64_t>();
    } else if (name == "stop") {
      read_stop(value);
    } else {
      return false;
    }
    return true;
  }

  void read_text(const std::string& name, const nlohmann::json& value) {
    ++prompts_;
    if (!value.is_string()) return wrong(name, value, "a text or a list of tokens");
    line_.text = value.get<std::string>();
    if (line_.text.empty()) fail("the prompt is empty");
  }

  void read_tokens(const std::string& name, const nlohmann::json& value) {
    ++prompts_;
    if (!value.is_array()) return wrong(name, value, "a list of whole numbers");
    if (value.empty()) fail("the prompt is empty");
    for (const nlohmann::json& token : value) {
      if (!token.is_number_unsigned() || token.get<uint64_t>() > uint64_t{1} << 31) {
        return fail(fmt::format("{} has {}, and not only tokens", name, as_shown(token)));
      }
      line_.tokens.push_back(token.get<int64_t>());
    }
  }

  void read_messages(const nlohmann::json& value) {
    ++prompts_;
    if (!value.is_array()) return wrong("messages", value, "a list of messages");
    if (value.empty()) fail("the prompt is empty");
    nlohmann::json messages = nlohmann::json::array();
    for (const nlohmann::json& message : value) {
      if (!message.is_object()) return wrong("a message", message, "an object");
      nlohmann::json& read = messages.emplace_back(nlohmann::json::object());
      for (const auto& [name, field] : message.items()) {
        if (field.is_null()) continue;
        if (name == "content" && field.is_array()) {
          read[name] = text_of_parts(field);
        } else if (name != "role" && name != "content" && name != "name") {
          unknown("messages." + name);
        } else if (field.is_string()) {
          read[name] = field;
        } else {
          wrong("messages." + name, field, "a text");
        }
      }
      for (const char* name : {"role", "content"}) {
        if (!read.contains(name)) fail(fmt::format("a message has no {}", name));
      }
    }
    line_.messages = messages.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }

  std::string text_of_parts(const nlohmann::json& parts) {
    std::string text;
    for (const nlohmann::json& part : parts) {
      if (part.is_object() && part.size() == 2 && part.value("type", nlohmann::json()) == "text" &&
          part.value("text", nlohmann::json()).is_string()) {
        text += part["text"].get<std::string>();
      } else {
        fail(fmt::format("a message has a part that is no text: {}", as_shown(part)));
      }
    }
    return text;
  }

  void read_stop(const nlohmann::json& value) {
    const nlohmann::json list = value.is_array() ? value : nlohmann::json::array({value});
    if (list.size() > kStopsMax) return fail(fmt::format("stop has more than {} texts", kStopsMax));
    for (const nlohmann::json& text : list) {
      if (!text.is_string() || text == "") return wrong("stop", value, "texts");
      line_.stop.push_back(text.get<std::string>());
    }
  }

  void read_whole(const std::string& name, const nlohmann::json& value, uint64_t least,
                  uint64_t most, uint64_t& out) {
    if (value.is_number_unsigned() && value >= least && value <= most) {
      out = value.get<uint64_t>();
    } else {
      wrong(name, value, fmt::format("a whole number from {} to {}", least, most));
    }
  }

  void read_number(const std::string& name, const nlohmann::json& value, double& out) {
    value.is_number() ? void(out = value.get<double>()) : wrong(name, value, "a number");
  }

  PromptLine line_;
  uint32_t prompts_ = 0;
  bool seeded_ = false;
};

}  // namespace

PromptLine read_prompt_line(std::string_view text, uint64_t number,
                            const PromptDefaults& defaults) {
  return PromptReader(number, defaults).read(text);
}

}  // namespace smartinf::train
