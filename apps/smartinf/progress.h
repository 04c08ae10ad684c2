// How far long work has come, on standard error: a bar on a terminal, else a line now and then.
#pragma once

#include <cstdint>
#include <stop_token>
#include <string>

#include "smartinf/base/clock.h"
#include "smartinf/base/status.h"

namespace smartinf::apps {

/// Threads: one caller.
class Progress {
 public:
  /// `doing` is what the line begins with; `stop` is the user's Ctrl-C.
  Progress(std::string doing, std::stop_token stop);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void rename(std::string doing) { doing_ = std::move(doing); }
  /// Errors: kCancelled once the user asked to stop.
  base::Status operator()(uint64_t done, uint64_t total);
  /// Makes room for other lines: takes the bar away until the next call.
  void clear();

 private:
  std::string doing_;
  std::stop_token stop_;
  bool terminal_;
  bool drawn_ = false;
  uint64_t shown_ns_ = base::now_ns();
};

}  // namespace smartinf::apps
