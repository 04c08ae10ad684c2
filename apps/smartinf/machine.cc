#include "apps/smartinf/machine.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "smartinf/base/text.h"

#include "apps/smartinf/child.h"

namespace smartinf::apps {
namespace {

namespace fs = std::filesystem;

// Files of /proc and /sys; empty when absent.
std::string read_text(const fs::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string trimmed(std::string text) {
  const auto space = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
  text.erase(std::find_if_not(text.rbegin(), text.rend(), space).base(), text.end());
  text.erase(text.begin(), std::find_if_not(text.begin(), text.end(), space));
  return text;
}

std::optional<uint64_t> to_number(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

std::optional<uint64_t> number_in(const fs::path& path) {
  return to_number(trimmed(read_text(path)));
}

// The value behind "Name:" in /proc/meminfo, in bytes.
uint64_t meminfo_bytes(const std::string& text, std::string_view name) {
  const size_t at = text.find(fmt::format("{}:", name));
  if (at == std::string::npos) return 0;
  return to_number(trimmed(text.substr(at + name.size() + 1, 30))).value_or(0) * 1024;
}

// Folders of the cgroups this process is in, from its own up to the root; version 2, or the given
// controller of version 1.
std::vector<fs::path> cgroup_folders(std::string_view controller) {
  std::vector<fs::path> folders;
  std::istringstream lines(read_text("/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    fs::path top = "/sys/fs/cgroup";
    if (!controllers.empty()) {
      if (controllers != controller) continue;
      top /= controllers;
    }
    fs::path relative = fs::path(line.substr(second + 1)).relative_path();
    while (true) {
      folders.push_back(top / relative);
      if (relative.empty()) break;
      relative = relative.parent_path();
    }
  }
  return folders;
}

// One line of /proc/self/mountinfo.
struct Mount {
  std::string point;
  std::string file_system;
  std::string source;
  bool read_only = false;
};

// Spaces and the like are written as \040 there.
std::string unescaped(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      out +=
          static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + text[i + 3] - '0');
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

// The mount whose point is the longest beginning of the path; of two at one point the later.
std::optional<Mount> mount_of(const fs::path& path) {
  std::error_code error;
  const std::string wanted = fs::canonical(path, error).string() + "/";
  std::istringstream lines(read_text("/proc/self/mountinfo"));
  std::optional<Mount> found;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string id, parent, number, root, point, options, word, source;
    words >> id >> parent >> number >> root >> point >> options;
    point = unescaped(point);
    if (!wanted.starts_with(point.ends_with('/') ? point : point + "/")) continue;
    if (found && found->point.size() > point.size()) continue;
    while (words >> word && word != "-") {
    }
    Mount mount;
    words >> mount.file_system >> source;
    mount.point = point;
    mount.source = unescaped(source);
    mount.read_only = options == "ro" || options.starts_with("ro,");
    found = mount;
  }
  return found;
}

// A block device's folder in /sys, of the whole drive when it is a partition.
fs::path drive_folder(dev_t device) {
  std::error_code error;
  fs::path folder =
      fs::canonical(fmt::format("/sys/dev/block/{}:{}", major(device), minor(device)), error);
  if (error) return {};
  if (fs::exists(folder / "partition", error)) folder = folder.parent_path();
  return folder;
}

// One aligned block, written and read past the page cache, in a file that never has a name.
void try_direct_io(DriveFacts& facts) {
  const int file =
      ::open(facts.existing_path.c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
  if (file < 0) {
    // EINVAL is how a file system refuses O_DIRECT; others do not know O_TMPFILE.
    if (errno == EINVAL) facts.direct_io = false;
    facts.direct_io_problem = std::strerror(errno);
    return;
  }
  void* block = std::aligned_alloc(4096, 4096);
  std::memset(block, 0x5a, 4096);
  const bool worked =
      ::pwrite(file, block, 4096, 0) == 4096 && ::pread(file, block, 4096, 0) == 4096;
  facts.direct_io = worked;
  if (!worked) facts.direct_io_problem = std::strerror(errno);
  std::free(block);
  ::close(file);
}

void read_wear(DriveFacts& facts) {
  if (facts.kernel_name.empty()) return;
  const std::string drive = "/dev/" + facts.kernel_name;
  constexpr std::chrono::milliseconds kWait{3000};
  const auto smart = child_output({"smartctl", "--json=c", "-A", drive}, kWait);
  const auto take = [&](const nlohmann::json& log, const char* source) {
    if (!log.is_object()) return false;
    const auto used = log.find("percentage_used");
    const auto used_other = log.find("percent_used");
    const auto units = log.find("data_units_written");
    if (used != log.end() && used->is_number()) {
      facts.wear_share = used->get<double>() / 100;
    } else if (used_other != log.end() && used_other->is_number()) {
      facts.wear_share = used_other->get<double>() / 100;
    }
    // The NVMe specification counts in thousands of 512-byte units.
    if (units != log.end() && units->is_number()) {
      facts.written_bytes = static_cast<uint64_t>(units->get<double>() * 512000);
    }
    if (facts.wear_share || facts.written_bytes) facts.wear_source = source;
    return facts.wear_share.has_value();
  };
  if (smart) {
    const nlohmann::json log = base::parse_json(*smart);
    if (log.is_object() && log.contains("nvme_smart_health_information_log") &&
        take(log["nvme_smart_health_information_log"], "smartctl")) {
      return;
    }
  }
  const auto nvme = child_output({"nvme", "smart-log", "-o", "json", drive}, kWait);
  if (nvme && take(base::parse_json(*nvme), "nvme")) return;
  facts.wear_source = smart || nvme ? "the drive does not report it, or only root can read it"
                                    : "install smartmontools or nvme-cli to see it";
}

// The kernel's own sensor of the drive (nvme, drivetemp): no tool and no root is needed.
std::optional<double> temperature_celsius(const fs::path& drive) {
  std::error_code error;
  for (const fs::path& place : {drive / "device", drive / "device/hwmon"}) {
    for (const auto& entry : fs::directory_iterator(place, error)) {
      if (!entry.path().filename().string().starts_with("hwmon")) continue;
      const std::string text = trimmed(read_text(entry.path() / "temp1_input"));
      double thousandths = 0;
      const auto [end, wrong] =
          std::from_chars(text.data(), text.data() + text.size(), thousandths);
      if (wrong == std::errc() && end != text.data()) return thousandths / 1000;
    }
  }
  return std::nullopt;
}

void read_drive(DriveFacts& facts, dev_t device) {
  const fs::path folder = drive_folder(device);
  if (folder.empty()) return;
  facts.kernel_name = folder.filename().string();
  facts.model = trimmed(read_text(folder / "device/model"));
  if (const auto rotational = number_in(folder / "queue/rotational")) {
    facts.rotational = *rotational != 0;
  }
  if (const auto node = number_in(folder / "device/numa_node")) {
    facts.numa_node = static_cast<uint32_t>(*node);
  }
  facts.temperature_celsius = temperature_celsius(folder);
  if (facts.is_block_device) {
    // Size of the partition, if it is one; /sys counts in sectors of 512 bytes.
    const auto sectors =
        number_in(fmt::format("/sys/dev/block/{}:{}/size", major(device), minor(device)));
    facts.size_bytes = sectors.value_or(0) * 512;
  }
  read_wear(facts);
}

}  // namespace

MemoryFacts memory_facts() {
  MemoryFacts facts;
  const std::string text = read_text("/proc/meminfo");
  facts.total_bytes = meminfo_bytes(text, "MemTotal");
  facts.available_bytes = meminfo_bytes(text, "MemAvailable");
  for (const fs::path& folder : cgroup_folders("memory")) {
    for (const char* name : {"memory.max", "memory.limit_in_bytes"}) {
      const auto limit = number_in(folder / name);
      // Version 1 writes "no limit" as a number close to 2^63.
      if (!limit || *limit >= uint64_t{1} << 60) continue;
      facts.cgroup_limit_bytes = std::min(facts.cgroup_limit_bytes.value_or(*limit), *limit);
    }
  }
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    facts.locked_limit_bytes = limit.rlim_cur;
  }
  return facts;
}

CpuFacts cpu_facts() {
  CpuFacts facts;
  std::istringstream lines(read_text("/proc/cpuinfo"));
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("model name")) continue;
    facts.model = trimmed(line.substr(line.find(':') + 1));
    break;
  }
  facts.cores_online = static_cast<uint32_t>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  cpu_set_t allowed;
  facts.cores_allowed = ::sched_getaffinity(0, sizeof(allowed), &allowed) == 0
                            ? static_cast<uint32_t>(CPU_COUNT(&allowed))
                            : facts.cores_online;
  for (const fs::path& folder : cgroup_folders("cpu")) {
    std::istringstream words(read_text(folder / "cpu.max"));
    double quota = 0;
    double period = 0;
    if (!(words >> quota >> period) || period <= 0) continue;  // "max 100000": no quota
    facts.cgroup_cores = std::min(facts.cgroup_cores.value_or(quota / period), quota / period);
  }
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("node") && to_number(name.substr(4))) ++facts.numa_nodes;
  }
  facts.numa_nodes = std::max(facts.numa_nodes, 1u);
  return facts;
}

std::string system_name() {
  std::string name = "Linux";
  std::istringstream lines(read_text("/etc/os-release"));
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("PRETTY_NAME=")) continue;
    name = line.substr(12);
    std::erase(name, '"');
  }
  utsname kernel{};
  if (::uname(&kernel) == 0) name += fmt::format(", {} {}", kernel.sysname, kernel.release);
  return name;
}

DriveFacts drive_facts(const std::string& path) {
  DriveFacts facts;
  facts.path = path;
  std::error_code error;
  fs::path existing = fs::absolute(path, error);
  while (!existing.empty() && !fs::exists(existing, error) && existing != existing.root_path()) {
    existing = existing.parent_path();
  }
  facts.existing_path = existing.string();
  struct stat entry {};
  if (::stat(facts.existing_path.c_str(), &entry) != 0) return facts;
  facts.is_block_device = S_ISBLK(entry.st_mode);
  facts.is_directory = S_ISDIR(entry.st_mode);
  facts.writable = ::access(facts.existing_path.c_str(), W_OK) == 0;
  dev_t device = facts.is_block_device ? entry.st_rdev : entry.st_dev;
  if (!facts.is_block_device) {
    if (const auto mount = mount_of(facts.existing_path)) {
      facts.file_system = mount->file_system;
      facts.mount_point = mount->point;
      facts.source = mount->source;
      facts.read_only_mount = mount->read_only;
      // Some file systems (btrfs) have device numbers of their own; what is mounted tells the
      // drive.
      struct stat source {};
      if (::stat(mount->source.c_str(), &source) == 0 && S_ISBLK(source.st_mode)) {
        device = source.st_rdev;
      }
    }
    struct statvfs space {};
    if (::statvfs(facts.existing_path.c_str(), &space) == 0) {
      facts.size_bytes = uint64_t{space.f_blocks} * space.f_frsize;
      facts.free_bytes = uint64_t{space.f_bavail} * space.f_frsize;
      facts.read_only_mount = facts.read_only_mount || (space.f_flag & ST_RDONLY) != 0;
    }
  }
  read_drive(facts, device);
  if (facts.is_directory && facts.writable) try_direct_io(facts);
  return facts;
}

GpuFacts gpu_facts() {
  GpuFacts facts;
  std::error_code error;
  facts.driver = fs::exists("/proc/driver/nvidia/version", error);
  if (!facts.driver) return facts;
  const auto listed = child_output(
      {"nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"},
      std::chrono::milliseconds(10000));
  std::istringstream lines(listed.value_or(""));
  for (std::string line; std::getline(lines, line);) {
    if (!trimmed(line).empty()) facts.devices.push_back(trimmed(line));
  }
  return facts;
}

}  // namespace smartinf::apps
