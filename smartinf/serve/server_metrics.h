// Measurements of a server of remote devices, and their text for Prometheus.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace smartinf::serve {

/// Builds the text form (version 0.0.4): a family, then its samples.
class MetricsText {
 public:
  using Labels = std::vector<std::pair<std::string_view, std::string_view>>;

  /// kind: "counter" or "gauge". A counter's name ends in _total.
  void family(std::string_view name, std::string_view kind, std::string_view help);
  /// Adds a sample to the last family. Values of labels may be any text.
  void sample(uint64_t value, const Labels& labels = {});
  void sample(double value, const Labels& labels = {});
  const std::string& text() const { return text_; }

 private:
  void begin_sample(const Labels& labels);
  std::string name_;
  std::string text_;
};

struct DeviceMetrics {
  std::string name;
  std::string holder;     // the client that has the lease; empty: nobody
  bool attached = false;  // that client is connected just now
  uint64_t usable = 0;    // 1: its directory or block device can be read and written
  uint64_t received_bytes = 0;
  uint64_t sent_bytes = 0;
  uint64_t commands = 0;
  uint64_t errors = 0;  // commands that failed
  uint64_t steps_committed = 0;
  uint64_t sessions = 0;     // that were ever opened
  uint64_t connections = 0;  // of sessions, likewise
  uint64_t memory_bytes = 0;
  uint64_t memory_limit_bytes = 0;
  // Figures of the drive; unset: not known.
  std::optional<uint64_t> capacity_bytes;
  std::optional<uint64_t> free_bytes;
  std::optional<double> temperature_celsius;
  std::optional<double> wear_share;  // of the rated life that is used up
  std::optional<uint64_t> drive_written_bytes;
};

struct ServerMetrics {
  std::string version;
  double started_s = 0;            // seconds since 1970
  uint64_t refused = 0;            // clients and requests that were not let in
  uint64_t resident_bytes = 0;     // of the process
  double certificate_until_s = 0;  // when the server's certificate expires, since 1970
  std::vector<DeviceMetrics> devices;
};

std::string metrics_text(const ServerMetrics& metrics);

}  // namespace smartinf::serve
