// What ranks tell each other, as bytes: all ranks of a run are the same program.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::engine {

class MessageWriter {
 public:
  template <typename T>
  MessageWriter& value(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  MessageWriter& text(std::string_view text) {
    value(uint64_t{text.size()});
    text_.append(text);
    return *this;
  }
  template <typename T>
  MessageWriter& list(const std::vector<T>& values) {
    value(uint64_t{values.size()});
    for (const T& each : values) value(each);
    return *this;
  }
  MessageWriter& status(const base::Status& status);
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

/// What is not there is zeros or empty, and makes ok() false.
class MessageReader {
 public:
  /// `text` outlives the reader.
  explicit MessageReader(std::string_view text) : rest_(text) {}

  template <typename T>
  T value() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    const std::string_view bytes = take(sizeof(T));
    if (ok_) std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  std::string text() { return std::string(take(value<uint64_t>())); }
  template <typename T>
  std::vector<T> list() {
    std::vector<T> values;
    const auto count = value<uint64_t>();
    for (uint64_t i = 0; i < count && ok_; ++i) values.push_back(value<T>());
    return values;
  }
  base::Status status();
  bool ok() const { return ok_; }

 private:
  std::string_view take(uint64_t bytes) {
    ok_ = ok_ && bytes <= rest_.size();
    if (!ok_) return {};
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }

  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace smartinf::engine
