// Facts about this machine as Linux tells them: memory, cores, drives. The advice is in doctor.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smartinf::apps {

struct MemoryFacts {
  uint64_t total_bytes = 0;
  uint64_t available_bytes = 0;
  std::optional<uint64_t> cgroup_limit_bytes;  // the tightest of the cgroups this process is in
  std::optional<uint64_t> locked_limit_bytes;  // RLIMIT_MEMLOCK; none: unlimited
};
MemoryFacts memory_facts();

struct CpuFacts {
  std::string model;
  uint32_t cores_online = 0;
  uint32_t cores_allowed = 0;          // by this process's affinity
  std::optional<double> cgroup_cores;  // cores that the cgroup's quota amounts to
  uint32_t numa_nodes = 0;
};
CpuFacts cpu_facts();

std::string system_name();  // "Debian GNU/Linux 12 (bookworm), Linux 6.1.0"

/// Facts about the drive below a path.
struct DriveFacts {
  std::string path;           // as asked for
  std::string existing_path;  // path, or the nearest folder above it that exists
  bool is_block_device = false;
  bool is_directory = false;
  bool writable = false;
  std::string file_system;  // "ext4"; empty on a block device
  std::string mount_point;
  std::string source;  // the mounted device, e.g. "/dev/nvme0n1p2"
  bool read_only_mount = false;
  uint64_t size_bytes = 0;
  uint64_t free_bytes = 0;        // for this user
  std::optional<bool> direct_io;  // none: could not be tried
  std::string direct_io_problem;
  std::string kernel_name;  // of the whole drive, e.g. "nvme0n1"; empty: unknown
  std::string model;
  std::optional<bool> rotational;
  std::optional<uint32_t> numa_node;
  std::optional<double> temperature_celsius;
  std::optional<double> wear_share;       // of the rated life that is used up, 0..
  std::optional<uint64_t> written_bytes;  // in the drive's life
  std::string wear_source;                // "smartctl", "nvme", or why it is not known
};
/// Tries direct I/O with one block in an unnamed file, when the path is a writable directory.
DriveFacts drive_facts(const std::string& path);

struct GpuFacts {
  bool driver = false;               // an NVIDIA kernel driver is loaded
  std::vector<std::string> devices;  // "name, memory, driver version" as nvidia-smi says it
};
GpuFacts gpu_facts();

}  // namespace smartinf::apps
