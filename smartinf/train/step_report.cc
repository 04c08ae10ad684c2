#include "smartinf/train/step_report.h"

#include <nlohmann/json.hpp>

namespace smartinf::train {

std::string StepReport::to_json() const {
  nlohmann::ordered_json line = {
      {"step", step},
      {"loss", loss},
      {"gradient_norm", gradient_norm},
      {"lr", lr},
      {"tokens", tokens},
      {"tokens_per_s", tokens_per_s()},
      {"seconds", seconds},
      {"forward_s", forward_s},
      {"backward_s", backward_s},
      {"update_s", update_s},
      {"host_up_bytes", host_up_bytes},
      {"host_down_bytes", host_down_bytes},
      {"store_read_bytes", store_read_bytes},
      {"store_written_bytes", store_written_bytes},
  };
  if (!skipped.empty()) line["skipped"] = skipped;
  return line.dump();
}

}  // namespace smartinf::train
