// Times a kernel and a triad of as many bytes in turn, so that a busy machine slows both, and
// prints a row for each.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/base/thread_team.h"

namespace smartinf::apps {

/// The share [first, last) of `count` things that thread `index` of `threads` has.
struct Share {
  uint64_t first;
  uint64_t last;
};
inline Share share_of(uint64_t count, uint32_t index, uint32_t threads) {
  return {count * index / threads, count * (index + 1) / threads};
}

/// Seconds that a team needs to read memory from end to end.
double read_seconds(base::ThreadTeam& team, std::span<const std::byte> memory);

/// Threads: one at a time.
class KernelTimer {
 public:
  struct Row {
    std::string kernel;
    std::string rule = {};
    std::string format = {};
    std::string gradient = {};
    double share = 0;    // share that is selected; 0: not a selection
    uint64_t bytes = 0;  // read and written by one run of the kernel
    int warm_up = 1;     // runs that are not timed
  };

  /// elements: parameters that a kernel works on. Medians are of `repeat` runs. With `json` the
  /// rows are an array.
  KernelTimer(uint64_t elements, int repeat, bool json)
      : elements_(elements), repeat_(repeat), json_(json) {}

  /// For the triad of a kernel that moves so many bytes. Errors: kOutOfMemory.
  base::Status allocate(uint64_t bytes_max);

  /// Prints what stands before and after the rows.
  void begin() const;
  void end() const;
  /// Calls work(index) for each index below the team's size, on its threads together. `prepare`,
  /// before each run of `work`, is not timed.
  void time(
      base::ThreadTeam& team, const Row& row, const std::function<void(uint32_t)>& work,
      const std::function<void()>& prepare = [] {});

 private:
  void print(const Row& row, uint32_t threads, const std::vector<double>& kernel_s,
             double triad_bytes_per_s);

  uint64_t elements_;
  int repeat_;
  bool json_;
  std::array<base::AlignedBuffer, 3> triad_;
  bool first_row_ = true;
};

}  // namespace smartinf::apps
