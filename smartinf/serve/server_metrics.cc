#include "smartinf/serve/server_metrics.h"

#include <cmath>

#include <fmt/format.h>

#include "smartinf/base/check.h"

namespace smartinf::serve {
namespace {

void append_escaped(std::string& out, std::string_view text, bool quotes) {
  for (const char c : text) {
    if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '"' && quotes) {
      out += "\\\"";
    } else {
      out += c;
    }
  }
}

}  // namespace

void MetricsText::family(std::string_view name, std::string_view kind, std::string_view help) {
  SI_CHECK((kind == "counter") == name.ends_with("_total"), "the name of a counter ends in _total");
  name_ = name;
  text_ += fmt::format("# HELP {} ", name);
  append_escaped(text_, help, false);
  text_ += fmt::format("\n# TYPE {} {}\n", name, kind);
}

void MetricsText::begin_sample(const Labels& labels) {
  text_ += name_;
  char before = '{';
  for (const auto& [label, value] : labels) {
    text_ += before;
    text_ += label;
    text_ += "=\"";
    append_escaped(text_, value, true);
    text_ += '"';
    before = ',';
  }
  text_ += labels.empty() ? " " : "} ";
}

void MetricsText::sample(uint64_t value, const Labels& labels) {
  begin_sample(labels);
  text_ += fmt::format("{}\n", value);
}

void MetricsText::sample(double value, const Labels& labels) {
  begin_sample(labels);
  if (std::isnan(value)) {
    text_ += "NaN\n";
  } else if (std::isinf(value)) {
    text_ += value > 0 ? "+Inf\n" : "-Inf\n";
  } else {
    text_ += fmt::format("{}\n", value);  // the shortest text that reads back as the same number
  }
}

namespace {

using Devices = std::vector<DeviceMetrics>;

/// A family with a sample of each device.
void per_device(MetricsText& text, const Devices& devices, std::string_view name,
                std::string_view kind, std::string_view help, uint64_t DeviceMetrics::*value) {
  text.family(name, kind, help);
  for (const DeviceMetrics& device : devices) {
    text.sample(device.*value, {{"device", device.name}});
  }
}

/// A gauge of each device that knows it; no family where none does.
template <typename T>
void gauge(MetricsText& text, const Devices& devices, std::string_view name, std::string_view help,
           std::optional<T> DeviceMetrics::*value) {
  bool begun = false;
  for (const DeviceMetrics& device : devices) {
    if (!(device.*value)) continue;
    if (!begun) text.family(name, "gauge", help);
    begun = true;
    text.sample(*(device.*value), {{"device", device.name}});
  }
}

}  // namespace

std::string metrics_text(const ServerMetrics& metrics) {
  MetricsText text;
  text.family("smartinf_build_info", "gauge", "The version that serves; always 1.");
  text.sample(uint64_t{1}, {{"version", metrics.version}});
  text.family("smartinf_start_time_seconds", "gauge", "When the server started, since 1970.");
  text.sample(metrics.started_s);
  text.family("smartinf_resident_memory_bytes", "gauge", "Memory of the process.");
  text.sample(metrics.resident_bytes);
  text.family("smartinf_certificate_expiry_time_seconds", "gauge",
              "When the server's certificate expires, since 1970.");
  text.sample(metrics.certificate_until_s);
  text.family("smartinf_refused_total", "counter", "Clients and requests that were not let in.");
  text.sample(metrics.refused);

  text.family("smartinf_device_client", "gauge",
              "The client that has the device: 1 while it is connected, 0 while it is away.");
  for (const DeviceMetrics& device : metrics.devices) {
    if (device.holder.empty()) continue;
    text.sample(uint64_t{device.attached}, {{"device", device.name}, {"client", device.holder}});
  }
  const Devices& devices = metrics.devices;
  using Device = DeviceMetrics;
  per_device(text, devices, "smartinf_device_usable", "gauge",
             "1 while its directory or block device can be read and written.", &Device::usable);
  per_device(text, devices, "smartinf_device_received_bytes_total", "counter",
             "Bytes that came from clients.", &Device::received_bytes);
  per_device(text, devices, "smartinf_device_sent_bytes_total", "counter",
             "Bytes that went to clients.", &Device::sent_bytes);
  per_device(text, devices, "smartinf_device_commands_total", "counter", "Commands of clients.",
             &Device::commands);
  per_device(text, devices, "smartinf_device_errors_total", "counter", "Commands that failed.",
             &Device::errors);
  per_device(text, devices, "smartinf_device_steps_committed_total", "counter",
             "Steps that were committed.", &Device::steps_committed);
  per_device(text, devices, "smartinf_device_sessions_total", "counter",
             "Sessions that were opened.", &Device::sessions);
  per_device(text, devices, "smartinf_device_connections_total", "counter",
             "Connections of sessions: more than sessions where some broke.", &Device::connections);
  per_device(text, devices, "smartinf_device_memory_bytes", "gauge",
             "Memory that clients' requests take now.", &Device::memory_bytes);
  per_device(text, devices, "smartinf_device_memory_limit_bytes", "gauge",
             "Memory that they may take.", &Device::memory_limit_bytes);
  gauge(text, devices, "smartinf_device_capacity_bytes", "What the drive or file system holds.",
        &Device::capacity_bytes);
  gauge(text, devices, "smartinf_device_free_bytes", "What is free of it.", &Device::free_bytes);
  gauge(text, devices, "smartinf_device_temperature_celsius", "The drive's temperature.",
        &Device::temperature_celsius);
  gauge(text, devices, "smartinf_device_wear_ratio",
        "The share of its rated life that the drive says is used up.", &Device::wear_share);
  gauge(text, devices, "smartinf_device_drive_written_bytes",
        "What was written to the drive in its life.", &Device::drive_written_bytes);
  return text.text();
}

}  // namespace smartinf::serve
