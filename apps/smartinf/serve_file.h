// The file of `smartinf serve`: what is offered, to whom, at which address. docs/remote.md has the
// keys.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::apps {

struct ServeDevice {
  std::string name;                  // grpc://host:port/NAME
  std::string path;                  // directory or block device
  std::vector<std::string> clients;  // names in their certificates; {"*"}: all of the authority's
  uint64_t memory_bytes = 0;         // 0: a share of the machine's
  uint64_t quota_bytes = 0;          // 0: what is free
  uint32_t threads = 0;              // 0: the cores shared out
  double bandwidth = 0;              // 0: measured
  uint64_t io_bytes = 0;             // of a transfer; 0: measured at first use, likewise...
  uint32_t io_depth = 0;             // ...how many at once
};

struct ServeFile {
  std::string listen = "0.0.0.0:7443";
  std::string certificate;
  std::string key;
  std::string ca;
  std::string revoked;          // empty: nobody is
  std::string metrics;          // file for Prometheus' node exporter, *.prom; empty: none
  double metrics_seconds = 15;  // between two writings of it
  double lease_seconds = 60;
  double keepalive_seconds = 10;
  std::vector<ServeDevice> devices;
};

/// Paths that are relative in the file are made so to its folder. Errors: kInvalidArgument with
/// line and column, for what is no TOML, unknown, missing or out of range; as errno says.
base::Result<ServeFile> read_serve_file(const std::string& path);

}  // namespace smartinf::apps
