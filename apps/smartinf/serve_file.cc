#include "apps/smartinf/serve_file.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include <fmt/format.h>

#include "smartinf/base/file.h"
#include "smartinf/base/key_table.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"

namespace smartinf::apps {
namespace {

using base::Result;

constexpr uint64_t kFileBytesMax = uint64_t{1} << 20;
constexpr size_t kDevicesMax = 256;

base::Number size(uint64_t& bytes) { return {&bytes, 1, 1e18, "of bytes such as \"4GiB\""}; }
base::Number count(uint32_t& number) { return {&number, 1, 1024, "from 1 to 1024"}; }
base::Number seconds(double& number) { return {&number, 1, 86400, "of seconds from 1 to 86400"}; }
base::Number rate(double& bytes) {
  return {&bytes, 1, 1e18, "of bytes per second such as \"3GB\""};
}

/// Paths of the file are relative to its folder.
void from_file(const std::string& file, std::string& path) {
  if (path.empty()) return;
  path = (std::filesystem::path(file).parent_path() / path).lexically_normal().string();
}

/// Whether a URL and a log line can show the name as it is.
bool good_name(std::string_view name) {
  return !name.empty() && name.size() <= 64 &&
         name.find_first_not_of(
             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
             "._-") == std::string_view::npos;
}

ServeDevice take_device(const base::TomlTable& table, const std::string& file,
                        base::KeyReader& reader) {
  ServeDevice device;
  reader.read("device", table,
              std::vector<base::NamedField>{{"name", &device.name},
                                            {"path", &device.path},
                                            {"clients", &device.clients},
                                            {"memory_budget", size(device.memory_bytes)},
                                            {"quota", size(device.quota_bytes)},
                                            {"threads", count(device.threads)},
                                            {"bandwidth", rate(device.bandwidth)},
                                            {"io_size", size(device.io_bytes)},
                                            {"io_depth", count(device.io_depth)}});
  from_file(file, device.path);
  if (!good_name(device.name)) {
    reader.problem(table.at, "a device needs a name: up to 64 letters, digits, '.', '-' and '_'");
  }
  if (device.path.empty()) {
    reader.problem(table.at, fmt::format("device {} needs a path", device.name));
  }
  if (device.io_bytes % 4096 != 0 || device.io_bytes > 64 * base::kMiB) {
    reader.problem(table.at, "io_size: expected a multiple of 4096, 64 MiB at most");
  }
  if (device.clients.empty() ||
      std::ranges::any_of(device.clients, [](const std::string& name) { return name.empty(); })) {
    reader.problem(table.at,
                   fmt::format("device {} does not say who may use it: name the clients, clients = "
                               "[\"gpu1\"], or [\"*\"] for every one that has a certificate of the "
                               "authority",
                               device.name));
  }
  return device;
}

void check_whole(const ServeFile& file, base::KeyReader& reader) {
  const base::TomlPlace top{1, 1};
  for (const auto& [name, value] : {std::pair("certificate", &file.certificate),
                                    std::pair("key", &file.key), std::pair("ca", &file.ca)}) {
    if (!value->empty()) continue;
    reader.problem(top, fmt::format("'{}' is missing: smartinf certificates --ca DIR --server NAME "
                                    "makes the three files",
                                    name));
  }
  if (file.devices.empty()) reader.problem(top, "there is no [[device]]");
  std::set<std::string> names;
  std::set<std::string> paths;
  for (const ServeDevice& device : file.devices) {
    if (!names.insert(device.name).second) {
      reader.problem(top, fmt::format("two devices are named {}", device.name));
    }
    std::error_code error;
    const auto canonical = std::filesystem::weakly_canonical(device.path, error);
    if (!paths.insert(error ? device.path : canonical.string()).second) {
      reader.problem(top, fmt::format("two devices have the path {}", device.path));
    }
  }
}

}  // namespace

Result<ServeFile> read_serve_file(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const std::string content,
                      base::read_text_file(path, "cannot read the server's file", kFileBytesMax));
  base::KeyReader reader(path);
  ServeFile file;
  const std::vector<base::NamedField> fields{
      {"listen", &file.listen},
      {"certificate", &file.certificate},
      {"key", &file.key},
      {"ca", &file.ca},
      {"revoked", &file.revoked},
      {"metrics", &file.metrics},
      {"metrics_seconds",
       base::Number{&file.metrics_seconds, 0.1, 86400, "of seconds from 0.1 to 86400"}},
      {"lease_seconds", seconds(file.lease_seconds)},
      {"keepalive_seconds", seconds(file.keepalive_seconds)},
      {"device", static_cast<bool*>(nullptr)}};  // a name only: read below
  for (const base::TomlEntry& entry : reader.parse(content)) {
    if (entry.name != "device") {
      reader.read("", base::TomlTable::Key{entry.name, entry.at, entry.value}, fields);
      continue;
    }
    for (const base::TomlTable& table : reader.list_of(entry, kDevicesMax)) {
      file.devices.push_back(take_device(table, path, reader));
    }
  }
  if (!base::printable(file.listen)) {
    reader.problem({1, 1}, "an address has characters that are none");
  }
  if (!file.metrics.empty() && !file.metrics.ends_with(".prom")) {
    reader.problem(
        {1, 1},
        "metrics names a file whose name ends in .prom, and no address any more: write "
        "metrics = \"/var/lib/prometheus/node-exporter/smartinf.prom\", which Prometheus' "
        "node exporter shows, or leave it out");
  }
  for (std::string* one : {&file.certificate, &file.key, &file.ca, &file.revoked, &file.metrics}) {
    from_file(path, *one);
  }
  if (reader.ok()) check_whole(file, reader);
  SI_RETURN_IF_ERROR(reader.status("See docs/remote.md for the keys of this file."));
  return file;
}

}  // namespace smartinf::apps
