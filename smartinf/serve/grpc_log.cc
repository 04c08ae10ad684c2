#include "smartinf/serve/grpc_log.h"

#include <atomic>
#include <string>

#include <grpc/support/log.h>

#include "smartinf/base/log.h"
#include "smartinf/serve/token_bucket.h"

namespace smartinf::serve::wire {
namespace {

std::atomic<bool> warns{false};

void log_line(gpr_log_func_args* line) {
  const bool warning = line->severity == GPR_LOG_SEVERITY_ERROR && warns;
  const std::string text = std::string("gRPC: ") + line->message;
  if (warning) {
    log_rarely("gRPC", text);
  } else {
    base::log(base::LogLevel::kDebug, text);
  }
}

}  // namespace

void take_grpc_log(bool listening) {
  if (listening) warns = true;
  gpr_set_log_function(log_line);
}

}  // namespace smartinf::serve::wire
