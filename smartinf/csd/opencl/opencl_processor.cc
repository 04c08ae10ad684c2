#include "smartinf/csd/opencl_processor.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/csd/opencl/context.h"
#include "smartinf/csd/opencl/folder.h"
#include "smartinf/csd/opencl/job_run.h"
#include "smartinf/csd/opencl/memory.h"
#include "smartinf/csd/opencl/programs.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::csd {
namespace opencl {
namespace {

using base::Status;

/// The slots' half of a region.
class RegionMemory final : public SlotMemory {
 public:
  explicit RegionMemory(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  std::span<std::byte> bytes() const override { return region_->bytes(); }

 private:
  std::shared_ptr<Region> region_;
};

/// Everything that jobs work with. A job that hangs keeps it, whatever has become of the processor.
class Jobs {
 public:
  Jobs(std::shared_ptr<Device> device, std::function<void(Job&)> on_finished)
      : device_(std::move(device)), programs_(*device_), on_finished_(std::move(on_finished)) {}

  /// One program of those that there will be, so that a device whose bits differ is refused at
  /// once.
  Status test() {
    SI_RETURN_IF_ERROR(programs_.update({.format = base::StateFormat::kQ8}).status());
    return programs_.planes().status();
  }

  base::Result<std::unique_ptr<SlotMemory>> allocate(uint64_t bytes) {
    SI_ASSIGN_OR_RETURN(std::shared_ptr<Region> region, Region::allocate(device_, bytes));
    // shared_ptr: jobs look for the device's half of what the slots' owner has.
    regions_.push_back(region);
    return std::unique_ptr<SlotMemory>(std::make_unique<RegionMemory>(std::move(region)));
  }

  void start(Job& job) {
    job.status = Status();
    Running* running = nullptr;
    {
      const std::lock_guard lock(mutex_);
      job.status = hangs_;
      if (hangs_.ok()) {
        if (free_.empty()) {
          all_.push_back(std::make_unique<Running>(*this));
          free_.push_back(all_.back().get());
        }
        running = free_.back();
        free_.pop_back();
        if (in_flight_++ == 0) last_end_ = Clock::now();
        running->job = &job;
      }
    }
    if (running == nullptr) return on_finished_(job);
    if (Status begun = running->run.begin(job); !begun.ok())
      return finish(*running, std::move(begun));
    const Status watched = device_->run("clSetEventCallback", [&] {
      return clSetEventCallback(running->run.last(), CL_COMPLETE, on_complete, running);
    });
    if (watched.ok()) return;
    const cl_event last = running->run.last();
    clWaitForEvents(1, &last);
    finish(*running, watched);
  }

  const std::shared_ptr<Device>& device() const { return device_; }
  uint32_t threads() const { return device_->info.cpu ? device_->compute_units : 0; }

  /// Waits until no job is in flight, or the jobs have been given up. False: given up.
  bool wait() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return in_flight_ == 0; });
    return hangs_.ok();
  }

  /// Gives up all jobs when none has ended for device_->options.silence_max: they finish with an
  /// error, as does every later one. Returns when `stop` is requested.
  void watch(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    const auto silence_max = device_->options.silence_max;
    while (!stop.stop_requested()) {
      stopping_.wait_for(lock, stop, silence_max / 4, [] { return false; });
      if (in_flight_ == 0 || !hangs_.ok() || Clock::now() - last_end_ < silence_max) continue;
      hangs_ = Status(
          base::ErrorCode::kTimeout,
          fmt::format("OpenCL device {} has not ended a job for {}", device_->info.name,
                      base::format_seconds(std::chrono::duration<double>(silence_max).count())),
          "Check its driver and the kernel's log (dmesg); the run goes on with processor = "
          "\"cpu\".");
      std::vector<Job*> given_up;
      for (const auto& running : all_) {
        if (Job* job = std::exchange(running->job, nullptr); job != nullptr) {
          job->status = hangs_;
          given_up.push_back(job);
        }
      }
      lock.unlock();
      for (Job* job : given_up) on_finished_(*job);
      lock.lock();
      in_flight_ -= static_cast<uint32_t>(given_up.size());
      idle_.notify_all();
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  /// One for every job at once; kept for the next.
  struct Running {
    explicit Running(Jobs& owner_)
        : owner(owner_), run(*owner_.device_, owner_.programs_, owner_.regions_) {}
    Jobs& owner;
    JobRun run;
    Job* job = nullptr;  // null: none, or given up
  };

  static void CL_CALLBACK on_complete(cl_event, cl_int status, void* running) {
    auto& done = *static_cast<Running*>(running);
    done.owner.finish(done, done.owner.device_->run("a kernel or a copy", [&] {
      return std::min<cl_int>(status, CL_SUCCESS);
    }));
  }

  void finish(Running& running, Status status) {
    Job* job = nullptr;
    {
      const std::lock_guard lock(mutex_);
      job = std::exchange(running.job, nullptr);
    }
    if (job == nullptr) return;  // too late: it was given up
    Status ended = running.run.end(status.ok());
    job->status = status.ok() ? std::move(ended) : std::move(status);
    {
      const std::lock_guard lock(mutex_);
      free_.push_back(&running);
    }
    on_finished_(*job);
    const std::lock_guard lock(mutex_);
    --in_flight_;
    last_end_ = Clock::now();
    idle_.notify_all();
  }

  std::shared_ptr<Device> device_;
  Programs programs_;
  std::vector<std::shared_ptr<Region>> regions_;
  std::function<void(Job&)> on_finished_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::condition_variable_any stopping_;
  uint32_t in_flight_ = 0;
  Clock::time_point last_end_;  // of a job, or when one began with no other in flight
  Status hangs_;                // not ok: the jobs were given up
  std::vector<std::unique_ptr<Running>> all_;  // as many as there were jobs at once
  std::vector<Running*> free_;                 // of them
};

class OpenClProcessor final : public Processor {
 public:
  OpenClProcessor(std::shared_ptr<Device> device, std::function<void(Job&)> on_finished)
      : jobs_(std::make_shared<Jobs>(std::move(device), std::move(on_finished))),
        watch_([jobs = jobs_](const std::stop_token& stop) { jobs->watch(stop); }) {}
  ~OpenClProcessor() override {
    if (!jobs_->wait()) storage::leak_in_flight(std::shared_ptr(jobs_));
  }

  Status test() { return jobs_->test(); }
  base::Result<std::unique_ptr<SlotMemory>> allocate(uint64_t bytes) override {
    return jobs_->allocate(bytes);
  }
  void start(Job& job) override { jobs_->start(job); }
  base::Result<std::unique_ptr<Folder>> make_folder(const kernels::AttentionShape& shape) override {
    return opencl::make_folder(jobs_->device(), shape);
  }
  uint32_t threads() const override { return jobs_->threads(); }

 private:
  const std::shared_ptr<Jobs> jobs_;
  std::jthread watch_;
};

}  // namespace
}  // namespace opencl

ProcessorFactory opencl_processor(OpenClOptions options) {
  return [options = std::move(options)](
             std::function<void(Job&)> on_finished) -> base::Result<std::unique_ptr<Processor>> {
    SI_ASSIGN_OR_RETURN(std::shared_ptr<opencl::Device> device, opencl::open_device(options));
    auto made =
        std::make_unique<opencl::OpenClProcessor>(std::move(device), std::move(on_finished));
    SI_RETURN_IF_ERROR(made->test());
    return std::unique_ptr<Processor>(std::move(made));
  };
}

base::Status opencl_self_test(const OpenClOptions& options) {
  SI_ASSIGN_OR_RETURN(const std::unique_ptr<opencl::Device> device, opencl::open_device(options));
  opencl::Programs programs(*device);
  uint32_t i = 0;
  const std::span<const base::StateFormat> formats = base::all_state_formats();
  for (const kernels::UpdateRule rule : kernels::all_update_rules()) {
    const auto nth = [](uint32_t n) { return static_cast<uint8_t>(n % 3); };
    const opencl::UpdateKind kind{.rule = rule,
                                  .format = formats[5 * i % formats.size()],
                                  .gradient = static_cast<base::DataType>(nth(i + 1)),
                                  .weights = static_cast<base::DataType>(nth(i + 2))};
    SI_RETURN_IF_ERROR(programs.update(kind).status());
    ++i;
  }
  return programs.planes().status();
}

}  // namespace smartinf::csd
