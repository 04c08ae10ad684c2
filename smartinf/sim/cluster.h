// Clusters as the simulator sees them: boxes, each with a machine of its own, and the links between
// them. Read from a TOML file that `smartinf calibrate --links` writes, or a person
// (docs/cluster.md).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/sim/machine.h"

namespace smartinf::sim {

/// One direction between two boxes, shared by their ranks.
struct Link {
  double bytes_per_s = 0;           // payload of large messages, alone
  double together_bytes_per_s = 0;  // while all boxes send; 0: as alone
  double latency_s = 0;             // of a small message
  double spread = 0;  // of the rate between rounds of measuring: (most - least) / median

  double shared() const { return together_bytes_per_s > 0 ? together_bytes_per_s : bytes_per_s; }
};

struct Box {
  std::string name;  // where torchrun finds it, if it is a host's
  std::string file;  // of its machine
  Machine machine;
  uint32_t ranks = 1;
};

struct Cluster {
  std::string name;
  std::string origin;  // file, for messages
  std::vector<Box> boxes;
  std::vector<Link> links;  // from box to box: [boxes x boxes]; of a box with itself unused

  const Link& link(uint32_t from, uint32_t to) const { return links[from * boxes.size() + to]; }
  Link& link(uint32_t from, uint32_t to) { return links[from * boxes.size() + to]; }
  uint32_t ranks() const;
  /// The most that a link's rate differs between rounds.
  double spread() const;
};

/// One box, which has no links.
Cluster one_box(const Machine& machine, uint32_t ranks);

/// "1 Gbit/s", "940 Mbit/s", "1.2 GB/s" in bytes per second. Errors: kInvalidArgument.
base::Result<double> parse_rate(std::string_view text);

/// load: a machine by the name that the file gives. Errors: kInvalidArgument naming file, line and
/// key; those of load.
using LoadMachine = std::function<base::Result<Machine>(const std::string& name)>;
base::Result<Cluster> parse_cluster(std::string_view toml_text, std::string_view origin,
                                    const LoadMachine& load);
/// Machine files are looked for beside the cluster's.
base::Result<Cluster> load_cluster(const std::string& path);
/// The text that parse_cluster reads back to the same cluster.
std::string cluster_to_toml(const Cluster& cluster);

}  // namespace smartinf::sim
