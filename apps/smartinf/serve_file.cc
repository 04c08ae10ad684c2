#include "apps/smartinf/serve_file.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <set>
#include <span>
#include <sstream>

#include <fmt/format.h>

#include "smartinf/base/file.h"
#include "smartinf/base/nearest.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"

#define TOML_HEADER_ONLY 1
#define TOML_EXCEPTIONS 0
#include "smartinf/base/toml.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr uint64_t kFileBytesMax = uint64_t{1} << 20;
constexpr size_t kDevicesMax = 256;

/// Where something stands, and what is wrong with it.
class Place {
 public:
  explicit Place(std::string path) : path_(std::move(path)) {}
  Status wrong(const toml::source_region& at, const std::string& what,
               std::string advice = "See docs/remote.md for the keys of this file.") const {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}:{}:{}: {}", path_, at.begin.line, at.begin.column, what),
                  std::move(advice));
  }
  std::string from_file(const std::string& path) const {
    if (path.empty()) return path;
    return (std::filesystem::path(path_).parent_path() / path).lexically_normal().string();
  }

 private:
  const std::string path_;
};

/// One key: its name, and what takes its value. An error says what was expected.
struct Key {
  std::string_view name;
  std::function<Status(const toml::node&)> take;
};

Status expected(const char* what) { return Status(ErrorCode::kInvalidArgument, what); }

Key text(std::string_view name, std::string& into) {
  return {name, [&into](const toml::node& node) {
            const auto value = node.value_exact<std::string>();
            if (!value || !base::printable(*value)) return expected("a text in quotes");
            into = *value;
            return Status();
          }};
}

Key file_path(std::string_view name, std::string& into, const Place& place) {
  return {name, [&into, &place](const toml::node& node) {
            const auto value = node.value_exact<std::string>();
            if (!value || value->empty()) return expected("a path in quotes");
            into = place.from_file(*value);
            return Status();
          }};
}

Key texts(std::string_view name, std::vector<std::string>& into) {
  return {name, [&into](const toml::node& node) {
            const toml::array* list = node.as_array();
            if (list == nullptr || list->empty()) return expected("a list of names: [\"gpu1\"]");
            for (const toml::node& item : *list) {
              const auto value = item.value_exact<std::string>();
              if (!value || value->empty()) return expected("a list of names: [\"gpu1\"]");
              into.push_back(*value);
            }
            return Status();
          }};
}

Key size(std::string_view name, uint64_t& into) {
  return {name, [&into](const toml::node& node) {
            const auto value = node.value_exact<std::string>();
            const Result<uint64_t> bytes = base::parse_bytes(value.value_or(""));
            if (!value || !bytes.ok() || *bytes == 0) return expected("a size such as \"4GiB\"");
            into = *bytes;
            return Status();
          }};
}

Key count(std::string_view name, uint32_t& into) {
  return {name, [&into](const toml::node& node) {
            const auto value = node.value_exact<int64_t>();
            if (!value || *value < 1 || *value > 1024) return expected("a number from 1 to 1024");
            into = static_cast<uint32_t>(*value);
            return Status();
          }};
}

Key seconds(std::string_view name, double& into) {
  return {name, [&into](const toml::node& node) {
            const auto value = node.value<double>();
            if (!value || !(*value >= 1) || *value > 86400) {
              return expected("seconds from 1 to 86400");
            }
            into = *value;
            return Status();
          }};
}

Key rate(std::string_view name, double& into) {
  return {name, [&into](const toml::node& node) {
            const auto value = node.value_exact<std::string>();
            const Result<uint64_t> bytes = base::parse_bytes(value.value_or(""));
            if (!value || !bytes.ok() || *bytes == 0) {
              return expected("bytes per second such as \"3GB\"");
            }
            into = static_cast<double>(*bytes);
            return Status();
          }};
}

Status take_table(const toml::table& table, std::span<const Key> keys, const Place& place) {
  for (const auto& [name, node] : table) {
    const auto found = std::ranges::find(keys, name.str(), &Key::name);
    if (found == keys.end()) {
      std::vector<std::string_view> names;
      for (const Key& key : keys) names.push_back(key.name);
      const std::string_view nearest = base::nearest_name(name.str(), names);
      return place.wrong(name.source(),
                         fmt::format("unknown key '{}'{}", name.str(),
                                     nearest.empty() ? std::string()
                                                     : fmt::format("; did you mean {}?", nearest)));
    }
    if (const Status status = found->take(node); !status.ok()) {
      return place.wrong(node.source(), fmt::format("{}: expected {}", name.str(), status.what()));
    }
  }
  return Status();
}

/// What a URL and a log line can show as it is.
bool good_name(std::string_view name) {
  return !name.empty() && name.size() <= 64 &&
         name.find_first_not_of(
             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
             "._-") == std::string_view::npos;
}

Result<ServeDevice> take_device(const toml::table& table, const Place& place) {
  ServeDevice device;
  const std::vector<Key> keys{
      text("name", device.name),           file_path("path", device.path, place),
      texts("clients", device.clients),    size("memory_budget", device.memory_bytes),
      size("quota", device.quota_bytes),   count("threads", device.threads),
      rate("bandwidth", device.bandwidth), size("io_size", device.io_bytes),
      count("io_depth", device.io_depth)};
  SI_RETURN_IF_ERROR(take_table(table, keys, place));
  const toml::source_region& at = table.source();
  if (!good_name(device.name)) {
    return place.wrong(at, "a device needs a name: up to 64 letters, digits, '.', '-' and '_'");
  }
  if (device.path.empty()) {
    return place.wrong(at, fmt::format("device {} needs a path", device.name));
  }
  if (device.io_bytes % 4096 != 0 || device.io_bytes > 64 * base::kMiB) {
    return place.wrong(at, "io_size: expected a multiple of 4096, 64 MiB at most");
  }
  if (device.clients.empty()) {
    return place.wrong(at, fmt::format("device {} does not say who may use it", device.name),
                       "Name the clients: clients = [\"gpu1\"], or [\"*\"] for every one that has "
                       "a certificate of the authority.");
  }
  return device;
}

Status check_whole(const ServeFile& file, const toml::table& table, const Place& place) {
  for (const auto& [name, value] : {std::pair("certificate", &file.certificate),
                                    std::pair("key", &file.key), std::pair("ca", &file.ca)}) {
    if (value->empty()) {
      return place.wrong(table.source(), fmt::format("'{}' is missing", name),
                         "smartinf certificates --ca DIR --server NAME makes the three files.");
    }
  }
  if (file.devices.empty()) return place.wrong(table.source(), "there is no [[device]]");
  std::set<std::string> names;
  std::set<std::string> paths;
  for (const ServeDevice& device : file.devices) {
    if (!names.insert(device.name).second) {
      return place.wrong(table.source(), fmt::format("two devices are named {}", device.name));
    }
    std::error_code error;
    const auto canonical = std::filesystem::weakly_canonical(device.path, error);
    if (!paths.insert(error ? device.path : canonical.string()).second) {
      return place.wrong(table.source(), fmt::format("two devices have the path {}", device.path));
    }
  }
  return Status();
}

}  // namespace

Result<ServeFile> read_serve_file(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const std::string content,
                      base::read_text_file(path, "cannot read the server's file", kFileBytesMax));
  const Place place(path);
  const toml::parse_result parsed = toml::parse(content, path);
  if (!parsed) {
    return place.wrong(parsed.error().source(), std::string(parsed.error().description()));
  }
  const toml::table& table = parsed.table();
  ServeFile file;
  Status wrong_device;
  const auto devices = [&](const toml::node& node) -> Status {
    const toml::array* list = node.as_array();
    if (list == nullptr || !list->is_homogeneous(toml::node_type::table)) {
      return expected("tables: write [[device]]");
    }
    if (list->size() > kDevicesMax) return expected("at most 256 devices");
    for (const toml::node& item : *list) {
      Result<ServeDevice> device = take_device(*item.as_table(), place);
      if (!device.ok()) {
        if (wrong_device.ok()) wrong_device = device.status();
        continue;
      }
      file.devices.push_back(std::move(*device));
    }
    return Status();
  };
  const std::vector<Key> keys{text("listen", file.listen),
                              file_path("certificate", file.certificate, place),
                              file_path("key", file.key, place),
                              file_path("ca", file.ca, place),
                              file_path("revoked", file.revoked, place),
                              text("metrics", file.metrics),
                              seconds("lease_seconds", file.lease_seconds),
                              seconds("keepalive_seconds", file.keepalive_seconds),
                              {"device", devices}};
  SI_RETURN_IF_ERROR(take_table(table, keys, place));
  SI_RETURN_IF_ERROR(wrong_device);
  SI_RETURN_IF_ERROR(check_whole(file, table, place));
  return file;
}

}  // namespace smartinf::apps
