#include "smartinf/train/step_report.h"

#include <nlohmann/json.hpp>

namespace smartinf::train {

namespace {

nlohmann::ordered_json by_kind(const std::array<uint64_t, base::kTrafficKinds>& bytes) {
  nlohmann::ordered_json kinds;
  for (size_t kind = 0; kind < bytes.size(); ++kind) {
    kinds[base::traffic_kind_name(static_cast<base::TrafficKind>(kind))] = bytes[kind];
  }
  return kinds;
}

}  // namespace

std::string StepReport::to_json() const {
  nlohmann::ordered_json line = {
      {"step", step},
      {"loss", loss},
      {"gradient_norm", gradient_norm},
      {"lr", lr},
      {"tokens", tokens},
      {"tokens_per_s", tokens_per_s()},
      {"began_s", began_s},
      {"seconds", seconds},
      {"forward_s", forward_s},
      {"backward_s", backward_s},
      {"update_s", update_s},
      {"exposed_s", exposed_s},
      {"overlap", overlap},
      {"wrong_guess", wrong_guess},
      {"host_up_bytes", traffic.host_link.up_total()},
      {"host_down_bytes", traffic.host_link.down_total()},
      {"store_read_bytes", traffic.store.up_total()},
      {"store_written_bytes", traffic.store.down_total()},
  };
  if (traffic.ranks.up_total() + traffic.ranks.down_total() > 0) {
    line["ranks_received_bytes"] = traffic.ranks.up_total();
    line["ranks_sent_bytes"] = traffic.ranks.down_total();
  }
  if (pipeline) {
    line["pipeline_sent_bytes"] = pipeline_sent_bytes;
    line["pipeline_wait_s"] = pipeline_wait_s;
  }
  for (size_t d = 0; d < traffic.devices.size(); ++d) {
    const base::TrafficReading& host = traffic.host_link_by_device[d];
    const base::TrafficReading& store = traffic.store_by_device[d];
    line["devices"].push_back({{"name", traffic.devices[d]},
                               {"host_up", by_kind(host.up_bytes)},
                               {"host_down", by_kind(host.down_bytes)},
                               {"read", by_kind(store.up_bytes)},
                               {"written", by_kind(store.down_bytes)}});
  }
  if (compressed_bytes > 0) {
    line["compressed_bytes"] = compressed_bytes;
    line["density"] = density;
    line["residual_norm"] = residual_norm;
  }
  if (offloaded.has_value()) line["offloaded"] = *offloaded;
  if (!offload_decision.empty()) line["offload_decision"] = offload_decision;
  if (targets != tokens) line["targets"] = targets;
  if (!skipped.empty()) line["skipped"] = skipped;
  return line.dump();
}

}  // namespace smartinf::train
