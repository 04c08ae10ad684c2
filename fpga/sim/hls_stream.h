// The part of Xilinx' <hls_stream.h> that our kernels use, for builds without Vitis: a queue of a
// fixed depth between two processes of sim/processes.h, with the waiting that there is on the card,
// and random stalls on top.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "processes.h"

/// Dataflow regions have processes (kernels/pragmas.h).
#define SI_SOFTWARE_STREAMS 1

namespace hls {

/// One process writes and one reads, as hardware needs it; another one ends the run with an error.
template <typename T, int kDepth = 0>
class stream;

template <typename T>
class stream<T, 0> {
 public:
  explicit stream(const char* name = "a stream", int depth = 2)
      : empty_(std::string("an element in ") + name), full_(std::string("room in ") + name) {
    const int wanted = software::Simulation::current().options().stream_depth;
    ring_.resize(static_cast<size_t>(wanted > 0 ? wanted : depth));
  }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;

  T read() {
    software::Simulation& run = software::Simulation::current();
    only_one(run, reader_, "reads");
    run.maybe_stall();
    while (count_ == 0) {
      reader_waits_ = true;
      run.wait(empty_);
    }
    const T value = ring_[first_].value;
    run.advance(ring_[first_].since);
    ring_[first_].since = run.now();
    first_ = first_ + 1 == ring_.size() ? 0 : first_ + 1;
    --count_;
    if (writer_waits_) {
      writer_waits_ = false;
      run.wake(writer_);
    }
    return value;
  }

  void write(const T& value) {
    software::Simulation& run = software::Simulation::current();
    only_one(run, writer_, "writes");
    run.maybe_stall();
    while (count_ == ring_.size()) {
      writer_waits_ = true;
      run.wait(full_);
    }
    const size_t behind = first_ + count_;
    Place& place = ring_[behind < ring_.size() ? behind : behind - ring_.size()];
    run.advance(place.since);
    place = {value, run.now()};
    ++count_;
    if (reader_waits_) {
      reader_waits_ = false;
      run.wake(reader_);
    }
  }

  bool empty() const { return count_ == 0; }

 private:
  struct Place {
    T value;
    double since;  // the cycle in which it was filled or emptied last
  };

  void only_one(software::Simulation& run, software::Simulation::Process*& known,
                const char* does) {
    if (known == nullptr) known = run.self();
    if (known != run.self())
      run.fail(std::string("a second process ") + does + " where " + empty_ + " is");
  }

  std::string empty_;
  std::string full_;
  std::vector<Place> ring_;
  size_t first_ = 0;
  size_t count_ = 0;
  software::Simulation::Process* reader_ = nullptr;
  software::Simulation::Process* writer_ = nullptr;
  bool reader_waits_ = false;
  bool writer_waits_ = false;
};

template <typename T, int kDepth>
class stream : public stream<T, 0> {
 public:
  explicit stream(const char* name = "a stream") : stream<T, 0>(name, kDepth) {}
};

}  // namespace hls
