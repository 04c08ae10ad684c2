#include "smartinf/model/key_reader.h"

#include <algorithm>

#include <fmt/format.h>

#include "smartinf/base/text.h"

namespace smartinf::model {

using base::ErrorCode;
using base::Status;
using Json = KeyReader::Json;

namespace {

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 60) + "..." : text;
}

}  // namespace

Status KeyReader::check_keys(std::string_view text, std::string_view file,
                             const std::string& path) {
  constexpr uint64_t kKeysMax = 20'000;
  const uint64_t keys = base::json_keys(text);
  if (keys <= kKeysMax) return Status();
  return Status(ErrorCode::kCorrupt,
                fmt::format("{} has {} keys, and no model needs above {}", file, keys, kKeysMax),
                "Get the model's folder again", base::ErrorPlace{path, {}, {}, 0});
}

const Json* KeyReader::find(const std::string& key) {
  read_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool KeyReader::given(const std::string& key) {
  read_.insert(key);
  return object_.contains(key);
}

uint32_t KeyReader::count(const std::string& key, std::optional<uint32_t> otherwise) {
  const Json* value = find(key);
  if (value == nullptr && otherwise.has_value()) return *otherwise;
  if (value != nullptr && value->is_number_unsigned() && value->get<uint64_t>() <= kCountMax) {
    return value->get<uint32_t>();
  }
  wrong(key, fmt::format("a whole number up to {}", kCountMax));
  return 0;
}

double KeyReader::number(const std::string& key, std::optional<double> otherwise, double least,
                         double most) {
  const Json* value = find(key);
  if (value == nullptr && otherwise.has_value()) return *otherwise;
  if (value != nullptr && value->is_number()) {
    const double number = value->get<double>();
    if (number >= least && number <= most) return number;
  }
  wrong(key, fmt::format("a number from {:g} to {:g}", least, most));
  return 1;
}

bool KeyReader::flag(const std::string& key, bool otherwise) {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (value->is_boolean()) return value->get<bool>();
  wrong(key, "true or false");
  return otherwise;
}

std::string KeyReader::text(const std::string& key, std::string otherwise) {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (value->is_string()) return value->get<std::string>();
  wrong(key, "a text");
  return otherwise;
}

void KeyReader::must_be(const std::string& key, const Json& value) {
  const Json* found = find(key);
  if (found != nullptr && *found != value) unsupported(key, *found, /*may_be_ignored=*/true);
}

void KeyReader::unsupported(const std::string& key, const Json& value, bool may_be_ignored) {
  unsupported_.push_back({prefix_ + key, shown(value), may_be_ignored});
}

void KeyReader::wrong(const std::string& key, std::string_view expected) {
  fail(Status(ErrorCode::kCorrupt,
              fmt::format("{}: {}{}: expected {}, found {}", file_, prefix_, key, expected,
                          object_.contains(key) ? shown(object_[key]) : "nothing"),
              "Check the file, or get the model's folder again", place()));
}

void KeyReader::fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
}

void KeyReader::take(KeyReader other) {
  fail(std::move(other.status_));
  unsupported_.insert(unsupported_.end(), other.unsupported_.begin(), other.unsupported_.end());
  const std::vector<std::string> unknown = other.unknown();
  unknown_.insert(unknown_.end(), unknown.begin(), unknown.end());
}

std::vector<std::string> KeyReader::unknown() const {
  std::vector<std::string> names = unknown_;
  for (const auto& [key, value] : object_.items()) {
    const bool off = value.is_null() || value == false || (value.is_structured() && value.empty());
    if (!off && !read_.contains(key)) {
      names.push_back(prefix_ + (base::printable(key) ? key : "a key that cannot be shown"));
    }
  }
  return names;
}

Status KeyReader::finish(std::span<const std::string> ignored, std::string_view option) const {
  SI_RETURN_IF_ERROR(status_);
  std::vector<std::string> what;
  std::vector<std::string> names;
  bool may_be_ignored = true;
  for (const Unsupported& one : unsupported_) {
    if (one.may_be_ignored && std::ranges::find(ignored, one.key) != ignored.end()) continue;
    what.push_back(one.key + " is " + one.value);
    names.push_back(one.key);
    may_be_ignored = may_be_ignored && one.may_be_ignored;
  }
  if (what.empty()) return Status();
  const bool one = what.size() == 1;
  std::string advice = fmt::format(
      "Choose a model without {}; docs/models.md says what is implemented", one ? "it" : "them");
  if (may_be_ignored) {
    advice += fmt::format(". If you know that {} nothing: {} {}",
                          one ? "it changes" : "they change", option, fmt::join(names, ","));
  }
  return Status(ErrorCode::kUnsupported,
                fmt::format("config.json: {}, which {} not implemented", fmt::join(what, ", "),
                            one ? "is" : "are"),
                std::move(advice), place());
}

}  // namespace smartinf::model
