// Reads the keys of a JSON object that somebody else wrote, and finds out which ones nobody reads.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "smartinf/base/status.h"

namespace smartinf::model {

/// Reads keys one by one. Of errors the first is kept, of unsupported keys all. Threads: one.
class KeyReader {
 public:
  using Json = nlohmann::ordered_json;

  /// Checks a file's text, before it is made a Json. Errors: kCorrupt, it has more keys than a
  /// model's config can have.
  static base::Status check_keys(std::string_view text, std::string_view file,
                                 const std::string& path);
  static constexpr uint64_t kCountMax = uint64_t{1} << 24;
  // No factor of a configuration needs numbers beyond these, and f32 holds what follows from them.
  static constexpr double kLeast = 1e-6;
  static constexpr double kMost = 1e6;

  /// object: outlives the reader. path: for messages; prefix: of an object within the file.
  KeyReader(const Json& object, std::string path, std::string prefix = {},
            std::string_view file = "config.json")
      : object_(object), path_(std::move(path)), prefix_(std::move(prefix)), file_(file) {}

  /// Null where the key is not given, or is null.
  const Json* find(const std::string& key);
  bool has(const std::string& key) { return find(key) != nullptr; }
  /// Also where it is null.
  bool given(const std::string& key);
  uint32_t count(const std::string& key, std::optional<uint32_t> otherwise = std::nullopt);
  /// From least to most; `otherwise` may lie outside.
  double number(const std::string& key, std::optional<double> otherwise, double least = kLeast,
                double most = kMost);
  bool flag(const std::string& key, bool otherwise);
  std::string text(const std::string& key, std::string otherwise);

  /// Another value is refused, unless the user knows that it changes nothing.
  void must_be(const std::string& key, const Json& value);
  void unsupported(const std::string& key, const Json& value, bool may_be_ignored = false);
  void wrong(const std::string& key, std::string_view expected);
  void fail(base::Status status);
  /// Adds what a reader of one of the values has found.
  void take(KeyReader other);

  base::ErrorPlace place() const { return {path_, {}, {}, 0}; }
  const std::string& path() const { return path_; }
  /// Keys that nobody asked for; null, false and what is empty says nothing.
  std::vector<std::string> unknown() const;
  /// ignored: what the user knows to change nothing, named by `option`. Errors: kCorrupt,
  /// kUnsupported.
  base::Status finish(std::span<const std::string> ignored, std::string_view option) const;

 private:
  struct Unsupported {
    std::string key;
    std::string value;
    bool may_be_ignored;
  };
  const Json& object_;
  std::string path_;
  std::string prefix_;
  std::string_view file_;
  std::set<std::string> read_;
  std::vector<Unsupported> unsupported_;
  std::vector<std::string> unknown_;
  base::Status status_;
};

}  // namespace smartinf::model
