// The contract that every device kind keeps, as a fixture: same bits for the same gradients as the
// plain reference, whatever the ring, schedule, processor, threads, slots, links, state format or
// place of the gradients. The tests stand in device_contract_*_test.cc by subject. For tests.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/check.h"
#include "smartinf/base/test_all.h"
#include "smartinf/base/test_scratch.h"
#include "smartinf/csd/emulated_device.h"
#include "smartinf/csd/fake_device.h"
#include "smartinf/csd/fault_ring.h"
#include "smartinf/csd/local_device.h"
#include "smartinf/csd/opencl_processor.h"
#include "smartinf/csd/reverse_processor.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/csd/test_device.h"
#include "smartinf/csd/test_opencl.h"
#include "smartinf/serve/test_server.h"

namespace smartinf::csd {

using base::DataType;
using base::StateFormat;
using base::Status;

struct Kind {
  std::string name;
  bool memory = true;            // an emulated drive; else a directory and a real ring
  bool fake = false;             // the engine's tests' own
  bool remote = false;           // over a server within the process
  bool other_processor = false;  // ReverseProcessor
  bool opencl = false;           // OpenClProcessor on the first device there is
  OpenClMemory opencl_memory = OpenClMemory::kAuto;
  StateFormat format = StateFormat::kF32;
  kernels::UpdateRule rule = kernels::UpdateRule::kAdamW;
  storage::RingKind ring = storage::RingKind::kAuto;
  plan::ScheduleVariant schedule = plan::ScheduleVariant::kOverlapped;
  uint32_t threads = 2;
  uint32_t slots = 3;
  bool spill = false;
  bool links = false;
  bool checksums = true;
  storage::Durability durability = storage::Durability::kStep;
  DataType gradient_type = DataType::kBf16;
  DataType weights_type = DataType::kBf16;
  HostLinkPlace place = HostLinkPlace::kAtProcessor;
  TestSparsity sparsity;  // every > 1: gradients come compressed
  uint64_t cached = 0;    // subgroups of the six whose state stays in memory
  bool writes_postponed() const { return cached > 0 && durability == storage::Durability::kNone; }
};

inline std::vector<Kind> kinds() {
  std::vector<Kind> all;
  const auto add = [&](std::string name, auto change) {
    Kind kind;
    kind.name = std::move(name);
    change(kind);
    all.push_back(kind);
  };
  add("memory", [](Kind&) {});
  add("fake", [](Kind& k) { k.fake = true; });
  add("local", [](Kind& k) { k.memory = false; });
  add("local_threads_ring", [](Kind& k) {
    k.memory = false;
    k.ring = storage::RingKind::kThreads;
  });
  add("local_spilled", [](Kind& k) {
    k.memory = false;
    k.spill = true;
  });
  add("naive", [](Kind& k) { k.schedule = plan::ScheduleVariant::kNaive; });
  add("one_slot", [](Kind& k) { k.slots = 1; });
  add("many_slots", [](Kind& k) { k.slots = 32; });
  add("one_thread", [](Kind& k) { k.threads = 1; });
  add("five_threads", [](Kind& k) { k.threads = 5; });
  add("other_processor", [](Kind& k) { k.other_processor = true; });
  add("other_processor_q8_spilled", [](Kind& k) {
    k.other_processor = true;
    k.format = StateFormat::kQ8;
    k.spill = true;
  });
  add("bf16_state", [](Kind& k) { k.format = StateFormat::kBf16; });
  add("q8_state", [](Kind& k) { k.format = StateFormat::kQ8; });
  add("m24_q4_spilled_half_in_memory", [](Kind& k) {
    k.format = {base::MomentFormat::kQ4, base::MasterFormat::kM24};
    k.spill = true;
    k.cached = 3;
  });
  add("bf16_master_f32_both_ways", [](Kind& k) {
    k.format.master = base::MasterFormat::kBf16;
    k.gradient_type = k.weights_type = DataType::kF32;
  });
  add("no_checksums", [](Kind& k) { k.checksums = false; });
  add("scratch", [](Kind& k) { k.durability = storage::Durability::kNone; });
  add("f32_both_ways", [](Kind& k) { k.gradient_type = k.weights_type = DataType::kF32; });
  add("f16_both_ways", [](Kind& k) { k.gradient_type = k.weights_type = DataType::kF16; });
  add("spilled", [](Kind& k) { k.spill = true; });
  add("spilled_q8_naive", [](Kind& k) {
    k.spill = true;
    k.format = StateFormat::kQ8;
    k.schedule = plan::ScheduleVariant::kNaive;
  });
  add("behind_links", [](Kind& k) { k.links = true; });
  add("host_update", [](Kind& k) {
    k.links = true;
    k.spill = true;
    k.place = HostLinkPlace::kAtStore;
    k.gradient_type = k.weights_type = DataType::kF32;
  });
  add("half_in_memory", [](Kind& k) { k.cached = 3; });
  add("all_in_memory", [](Kind& k) { k.cached = 6; });
  add("local_half_in_memory", [](Kind& k) {
    k.memory = false;
    k.cached = 3;
  });
  add("bf16_half_in_memory", [](Kind& k) {
    k.format = StateFormat::kBf16;
    k.cached = 3;
  });
  add("other_processor_all_in_memory", [](Kind& k) {
    k.other_processor = true;
    k.cached = 6;
  });
  add("q8_spilled_naive_half_in_memory", [](Kind& k) {
    k.format = StateFormat::kQ8;
    k.spill = true;
    k.schedule = plan::ScheduleVariant::kNaive;
    k.cached = 3;
  });
  add("one_slot_no_checksums_half_in_memory", [](Kind& k) {
    k.slots = 1;
    k.checksums = false;
    k.cached = 3;
  });
  add("host_update_half_in_memory", [](Kind& k) {
    k.links = true;
    k.place = HostLinkPlace::kAtStore;
    k.spill = true;
    k.gradient_type = k.weights_type = DataType::kF32;
    k.cached = 3;
  });
  add("behind_links_half_in_memory", [](Kind& k) {
    k.links = true;
    k.cached = 3;
  });
  add("scratch_half_in_memory", [](Kind& k) {
    k.durability = storage::Durability::kNone;
    k.cached = 3;
  });
  add("local_scratch_all_in_memory", [](Kind& k) {
    k.memory = false;
    k.durability = storage::Durability::kNone;
    k.cached = 6;
  });
  add("remote", [](Kind& k) { k.remote = true; });
  add("remote_local_spilled", [](Kind& k) {
    k.remote = true;
    k.memory = false;
    k.spill = true;
  });
  add("remote_q8_half_in_memory", [](Kind& k) {
    k.remote = true;
    k.format = StateFormat::kQ8;
    k.cached = 3;
  });
  add("remote_m24_q4", [](Kind& k) {
    k.remote = true;
    k.format = {base::MomentFormat::kQ4, base::MasterFormat::kM24};
  });
  add("remote_scratch_f32_both_ways", [](Kind& k) {
    k.remote = true;
    k.durability = storage::Durability::kNone;
    k.gradient_type = k.weights_type = DataType::kF32;
  });
  add("remote_one_slot_naive", [](Kind& k) {
    k.remote = true;
    k.slots = 1;
    k.schedule = plan::ScheduleVariant::kNaive;
  });
  // Kinds that are left have every option, and most of them together with others.
  constexpr std::string_view kLeftOut[] = {"scratch",
                                           "one_slot",
                                           "naive",
                                           "spilled",
                                           "bf16_state",
                                           "host_update",
                                           "scratch_half_in_memory",
                                           "local_spilled",
                                           "many_slots",
                                           "one_thread",
                                           "other_processor",
                                           "q8_state",
                                           "bf16_master_f32_both_ways",
                                           "no_checksums",
                                           "f32_both_ways",
                                           "spilled_q8_naive",
                                           "behind_links",
                                           "half_in_memory",
                                           "all_in_memory",
                                           "local_half_in_memory",
                                           "bf16_half_in_memory",
                                           "other_processor_all_in_memory",
                                           "host_update_half_in_memory"};
  base::leave_for_the_night(all, kLeftOut);
  return all;
}

/// Kinds of the OpenCL processor, for the tests that are about what a processor does; all, or those
/// of some names.
inline std::vector<Kind> opencl_kinds(std::initializer_list<std::string_view> names = {}) {
  std::vector<Kind> all;
  const auto add = [&](std::string name, auto change) {
    Kind kind;
    kind.name = std::move(name);
    kind.opencl = true;
    change(kind);
    all.push_back(kind);
  };
  add("opencl", [](Kind&) {});
  add("opencl_bf16_q8_copied_spilled", [](Kind& k) {
    k.format = {base::MomentFormat::kQ8, base::MasterFormat::kBf16};
    k.opencl_memory = OpenClMemory::kCopied;
    k.spill = true;
  });
  add("opencl_bf16_f32_both_ways", [](Kind& k) {
    k.format = StateFormat::kBf16;
    k.gradient_type = k.weights_type = DataType::kF32;
  });
  add("opencl_copied_half_in_memory", [](Kind& k) {
    k.opencl_memory = OpenClMemory::kCopied;
    k.cached = 3;
  });
  add("opencl_all_in_memory", [](Kind& k) { k.cached = 6; });
  add("opencl_peer_spilled", [](Kind& k) {
    k.opencl_memory = OpenClMemory::kPeer;
    k.spill = true;
  });
  add("opencl_m24_q4_peer_half_in_memory", [](Kind& k) {
    k.format = {base::MomentFormat::kQ4, base::MasterFormat::kM24};
    k.opencl_memory = OpenClMemory::kPeer;
    k.cached = 3;
  });
  add("opencl_one_slot_no_checksums", [](Kind& k) {
    k.slots = 1;
    k.checksums = false;
  });
  if (names.size() > 0) {
    std::erase_if(
        all, [&](const Kind& kind) { return std::ranges::find(names, kind.name) == names.end(); });
    SI_CHECK(all.size() == names.size(), "a name is wrong");
  }
  return all;
}

class DeviceContract : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (GetParam().opencl) {
      if (const std::string why = no_opencl(); !why.empty()) GTEST_SKIP() << why;
    }
    if (GetParam().remote && !serve::wire::has_transport()) GTEST_SKIP() << "built without gRPC";
    layout_ =
        test_layout(GetParam().format, GetParam().spill ? type_bytes() : 0, 6, GetParam().rule);
    const storage::StoredSubgroup& last = layout_.subgroups.back();
    groups_ = test_groups(last.first_element + last.count);
    matrices_ = test_matrices(last.first_element + last.count);
    host_link_ = std::make_shared<Link>(LinkOptions{"host", 4e9, 4e9, false, {}});
    drive_link_ = std::make_shared<Link>(LinkOptions{"drive", 2e9, 1e9, true, {}});
  }

  uint32_t type_bytes() const {
    return static_cast<uint32_t>(base::data_type_bytes(GetParam().gradient_type));
  }
  LocalDeviceOptions options() const {
    const Kind& kind = GetParam();
    LocalDeviceOptions options;
    options.path = scratch_ / "device";
    options.name = "drive-a";
    options.threads = kind.threads;
    if (kind.other_processor) options.make_processor = make_reverse_processor;
    if (kind.opencl) {
      OpenClOptions opencl;
      opencl.memory = kind.opencl_memory;
      opencl.pretend_peer = kind.opencl_memory == OpenClMemory::kPeer;
      options.make_processor = opencl_processor(std::move(opencl));
    }
    if (make_processor_) options.make_processor = make_processor_;
    options.slots = kind.slots;
    options.weight_read_slots = weight_read_slots_;
    options.gradient_type = kind.gradient_type;
    // Room for one subgroup's gradient, so that both ways are gone; the host update keeps none.
    if (kind.spill) options.gradient_budget_bytes = 2 * base::kBlockElements * type_bytes();
    if (kind.place == HostLinkPlace::kAtStore) options.gradient_budget_bytes = 0;
    if (kind.sparsity.every > 1) options.compressed_block_bytes = 8192;
    if (kind.sparsity.factors) options.matrices = matrices_;
    options.schedule = kind.schedule;
    options.store.ring.kind = kind.ring;
    options.store.durability = kind.durability;
    options.store.checksums = kind.checksums;
    options.store.io_bytes = 256 * 1024;
    options.store.spool_bytes = spool_bytes_;
    options.cache_memory_bytes = cache_memory_bytes_;
    options.cache_bytes = cache_bytes_;
    options.row_memory_bytes = row_memory_bytes_;
    if (faulty_) {
      options.store.wrap_ring = [this](std::unique_ptr<storage::Ring> ring) {
        return std::make_unique<FaultRing>(std::move(ring), faults_);
      };
    }
    options.groups = groups_;
    options.host_link_place = kind.place;
    if (kind.links) {
      options.links.store = {drive_link_};
      if (kind.place == HostLinkPlace::kAtStore) {
        options.links.store.push_back(host_link_);
      } else {
        options.links.host = host_link_;
      }
    }
    return options;
  }

  Status run(Message message) { return driver_.run(std::move(message)); }
  Status prepare(uint64_t step) { return driver_.prepare(step); }

  base::Result<std::unique_ptr<Device>> make_device(const storage::StoreLayout& layout) const {
    return GetParam().memory ? create_emulated_device(options(), layout, *drive_)
                             : create_local_device(options(), layout);
  }
  base::Result<std::unique_ptr<Device>> open_device() const {
    return GetParam().memory ? open_emulated_device(options(), *drive_)
                             : open_local_device(options());
  }
  /// Share of the device as a client gives it; the rest is options().
  DeviceShare share() const {
    DeviceShare share;
    share.cache_memory_bytes = cache_memory_bytes_;
    share.row_memory_bytes = row_memory_bytes_;
    share.groups = groups_;
    if (GetParam().sparsity.factors) share.matrices = matrices_;
    return share;
  }
  using Made = base::Result<std::unique_ptr<Device>>;
  Made counted(Made made) {
    if (!made.ok()) return made;
    return std::unique_ptr<Device>(
        std::make_unique<serve::wire::CountedDevice>(std::move(*made), commands_served_));
  }
  /// Comes back when the device itself has the command, where a server has it. Commands with other
  /// messages may be counted later than they are carried out.
  void start_at_device(Command& command) {
    const std::atomic<uint64_t>& served = commands_served_[command.message.index()];
    const uint64_t before = served;
    driver_.start(command);
    while (GetParam().remote && served == before) std::this_thread::yield();
  }
  /// A server for the device, and a client's way to it.
  DeviceSource& serve() {
    const serve::wire::TestSource::Functions functions{
        [this](const storage::StoreLayout& layout, const DeviceShare&) {
          return counted(make_device(layout));
        },
        [this](const DeviceShare&) { return counted(open_device()); },
        [this]() -> base::Result<storage::StoreSummary> {
          return GetParam().memory ? drive_->summarize() : storage::summarize(options().path);
        },
        {},
        {}};
    serve::ServedDevice served;
    served.name = "drive-a";
    served.memory_bytes = uint64_t{1} << 30;
    served.source = [functions](const SourceWishes&) {
      return base::Result<std::unique_ptr<DeviceSource>>(
          std::make_unique<serve::wire::TestSource>("drive-a", functions));
    };
    server_ = serve::wire::start_test_server(serve::wire::test_server_options({served}));
    serve::RemoteDeviceOptions remote = serve::wire::test_remote(server_->port(), "drive-a");
    remote.name = "drive-a";
    remote_ = serve::remote_source(remote);
    return *remote_;
  }

  void create() {
    if (GetParam().fake) {
      fake_drive_ = std::make_shared<FakeDrive>();
      fake_drive_->layout = layout_;
      fake_drive_->spool_bytes = spool_bytes_;
      fake_drive_->committed.resize(layout_.subgroups.size());
      device_ = std::make_unique<FakeDevice>(fake_drive_, "drive-a", groups_);
      driver_.drive(*device_);
      const Status status = driver_.make_start(layout_);
      ASSERT_TRUE(status.ok()) << status.to_string();
      return;
    }
    if (GetParam().memory) {
      const auto size = EmulatedDrive::size_for(layout_, GetParam().durability, spool_bytes_);
      ASSERT_TRUE(size.ok()) << size.status().to_string();
      auto drive =
          EmulatedDrive::create(*size, cache_memory_bytes_ == 0 ? 0 : cache_bytes_, row_bytes_);
      ASSERT_TRUE(drive.ok()) << drive.status().to_string();
      drive_ = std::move(*drive);
    }
    auto made = GetParam().remote ? serve().create(layout_, share()) : make_device(layout_);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    device_ = std::move(*made);
    driver_.drive(*device_);
    ASSERT_TRUE(driver_.cache_state(layout_, GetParam().cached).ok());
    if (before_start_) before_start_();
    const Status status = driver_.make_start(layout_);
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  void open() {
    device_.reset();
    if (GetParam().fake) {
      device_ = std::make_unique<FakeDevice>(fake_drive_, "drive-a", groups_);
    } else {
      auto opened = GetParam().remote ? remote_->open(share()) : open_device();
      ASSERT_TRUE(opened.ok()) << opened.status().to_string();
      device_ = std::move(*opened);
    }
    driver_.drive(*device_);
    ASSERT_TRUE(driver_.cache_state(layout_, GetParam().cached).ok());
    const Status status = device_->recover_to(device_->state().committed_step);
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  void finish_step(uint64_t step) {
    const Status status = driver_.finish_step(step);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(device_->state().committed_step, step);
  }

  Status put(const storage::StoredSubgroup& subgroup, const std::vector<std::byte>& gradient,
             uint64_t first, uint64_t count) {
    return driver_.put(subgroup, gradient, GetParam().gradient_type, first, count);
  }
  /// Backward's order: last subgroup first, each in pieces.
  void put_all(uint64_t step) {
    std::mt19937_64 random(step);
    for (auto subgroup = layout_.subgroups.rbegin(); subgroup != layout_.subgroups.rend();
         ++subgroup) {
      const auto gradient = test_gradient(*subgroup, step, GetParam().gradient_type);
      for (uint64_t first = 0; first < subgroup->count;) {
        const uint64_t count = std::min(subgroup->count - first, 1 + random() % 100'000);
        const Status status = put(*subgroup, gradient, first, count);
        ASSERT_TRUE(status.ok()) << status.to_string();
        first += count;
      }
    }
  }
  Update update_of(uint64_t step) {
    Update update;
    update.weights_type = GetParam().weights_type;
    update.scalars = test_scalars(step, GetParam().rule);
    weights_.clear();
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      weights_.emplace_back(subgroup.count * base::data_type_bytes(update.weights_type));
    }
    for (size_t i = 0; i < weights_.size(); ++i) {
      update.updates.push_back({layout_.subgroups[i].id, weights_[i].data()});
    }
    return update;
  }
  void step(uint64_t number) {
    ASSERT_TRUE(run(BeginStep{number}).ok());
    put_all(number);
    Update update = update_of(number);
    driver_.ready.clear();
    const Status status = run(update);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(driver_.ready.size(), layout_.subgroups.size())
        << "weights are ready once per subgroup";
  }

  void expect_state(ReferenceModel& reference) {
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      const storage::StoredSubgroup& subgroup = layout_.subgroups[i];
      std::vector<std::vector<float>> planes(layout_.planes.size(),
                                             std::vector<float>(subgroup.count));
      ReadState read;
      read.subgroup = subgroup.id;
      read.count = subgroup.count;
      for (size_t p = 0; p < planes.size(); ++p) read.planes[p] = planes[p].data();
      const Status status = run(read);
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (size_t p = 0; p < planes.size(); ++p) {
        EXPECT_TRUE(planes[p] == reference.plane(i, p)) << "subgroup " << i << " plane " << p;
      }
    }
  }

  /// A plane of the layout's i-th subgroup, block by block.
  std::vector<float> plane_of(Snapshot& snapshot, size_t i, size_t plane) {
    const uint64_t count = layout_.subgroups[i].count;
    const base::Encoding encoding = base::plane_encoding(layout_.format, layout_.planes[plane]);
    std::vector<float> values(count);
    for (uint64_t first = 0; first < count; first += base::kBlockElements) {
      const uint64_t here = std::min(base::kBlockElements, count - first);
      std::vector<std::byte> encoded(base::encoded_bytes(encoding, here));
      const Status status =
          snapshot.read_blocks(i, plane, first / base::kBlockElements, 1, encoded);
      EXPECT_TRUE(status.ok()) << status.to_string();
      kernels::kernels().decode_block(encoding, layout_.planes[plane], encoded.data(),
                                      values.data() + first, here);
    }
    return values;
  }

  uint64_t spool_bytes_ = 0;
  uint64_t cache_memory_bytes_ = 0;
  uint64_t row_memory_bytes_ = 0;
  uint64_t row_bytes_ = 0;              // of an emulated drive, for tables
  std::function<void()> before_start_;  // of a device that was made, before its first step
  uint64_t cache_bytes_ = 4 * base::kMiB;
  uint32_t weight_read_slots_ = 0;
  ProcessorFactory make_processor_;  // in place of the kind's
  bool faulty_ = false;              // the store's ring goes by faults_
  mutable Faults faults_;
  const base::Scratch scratch_;
  storage::StoreLayout layout_;
  std::vector<plan::GroupSpan> groups_;
  std::vector<compress::MatrixLayout> matrices_;
  std::shared_ptr<Link> host_link_;
  std::shared_ptr<Link> drive_link_;
  DeviceDriver driver_;
  std::unique_ptr<EmulatedDrive> drive_;
  std::shared_ptr<FakeDrive> fake_drive_;
  serve::wire::CommandCounts commands_served_{};
  std::unique_ptr<serve::Server> server_;
  std::unique_ptr<DeviceSource> remote_;
  std::unique_ptr<Device> device_;
  std::vector<std::vector<std::byte>> weights_;
};

}  // namespace smartinf::csd
