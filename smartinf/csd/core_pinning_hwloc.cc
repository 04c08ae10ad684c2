#include <filesystem>
#include <memory>

#include <hwloc.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "smartinf/csd/core_pinning.h"

namespace smartinf::csd {
namespace {

struct Destroy {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
  void operator()(hwloc_bitmap_t bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Bitmap = std::unique_ptr<std::remove_pointer_t<hwloc_bitmap_t>, Destroy>;

/// The names under which sysfs knows the block device that holds a path: the partition's, then its
/// drive's. Empty for what has none (tmpfs, network file systems).
std::vector<std::string> block_device_names(const std::string& path) {
  struct stat info {};
  std::filesystem::path existing = path;
  while (stat(existing.empty() ? "." : existing.c_str(), &info) != 0) {
    if (!existing.has_relative_path()) return {};
    existing = existing.parent_path();
  }
  const dev_t number = S_ISBLK(info.st_mode) ? info.st_rdev : info.st_dev;
  const std::string link =
      "/sys/dev/block/" + std::to_string(major(number)) + ":" + std::to_string(minor(number));
  char resolved[PATH_MAX];
  if (realpath(link.c_str(), resolved) == nullptr) return {};
  std::vector<std::string> names;
  std::string folder = resolved;
  for (int level = 0; level < 2; ++level) {
    const size_t slash = folder.rfind('/');
    if (slash == std::string::npos) break;
    names.push_back(folder.substr(slash + 1));
    folder.resize(slash);
  }
  return names;
}

hwloc_obj_t find_drive(hwloc_topology_t topology, const std::string& path) {
  const std::vector<std::string> names = block_device_names(path);
  for (hwloc_obj_t device = hwloc_get_next_osdev(topology, nullptr); device != nullptr;
       device = hwloc_get_next_osdev(topology, device)) {
    if (device->name == nullptr) continue;
    for (const std::string& name : names) {
      if (name == device->name) return device;
    }
  }
  return nullptr;
}

}  // namespace

std::vector<uint32_t> cores_near(const std::string& path) {
  hwloc_topology_t made = nullptr;
  if (hwloc_topology_init(&made) != 0) return {};
  const std::unique_ptr<hwloc_topology, Destroy> topology(made);
  hwloc_topology_set_io_types_filter(made, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  if (hwloc_topology_load(made) != 0) return {};

  const Bitmap allowed(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(made)));
  const Bitmap bound(hwloc_bitmap_alloc());
  if (hwloc_get_cpubind(made, bound.get(), HWLOC_CPUBIND_PROCESS) == 0) {
    hwloc_bitmap_and(allowed.get(), allowed.get(), bound.get());
  }
  hwloc_const_cpuset_t near = nullptr;
  if (hwloc_obj_t drive = find_drive(made, path); drive != nullptr) {
    const hwloc_obj_t parent = hwloc_get_non_io_ancestor_obj(made, drive);
    if (parent != nullptr) near = parent->cpuset;
  }
  std::vector<uint32_t> cores;
  for (const bool want_near : {true, false}) {
    for (int core = hwloc_bitmap_first(allowed.get()); core >= 0;
         core = hwloc_bitmap_next(allowed.get(), core)) {
      const bool is_near = near != nullptr && hwloc_bitmap_isset(near, static_cast<unsigned>(core));
      if (is_near == want_near) cores.push_back(static_cast<uint32_t>(core));
    }
  }
  return cores;
}

void pin_thread(std::jthread& thread, uint32_t core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
}

}  // namespace smartinf::csd
