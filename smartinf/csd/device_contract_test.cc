// What every device kind must do: same bits for the same gradients as the plain reference, whatever
// the ring, schedule, threads, slots, links, state format or place of the gradients.
#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <unistd.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/csd/emulated_device.h"
#include "smartinf/csd/fake_device.h"
#include "smartinf/csd/fault_ring.h"
#include "smartinf/csd/local_device.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/csd/test_device.h"

namespace smartinf::csd {
namespace {

using base::DataType;
using base::StateFormat;
using base::Status;

struct Kind {
  std::string name;
  bool memory = true;  // an emulated drive; else a directory and a real ring
  bool fake = false;   // the engine's tests' own
  StateFormat format = StateFormat::kF32;
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
  bool held_back() const { return cached > 0 && durability == storage::Durability::kNone; }
};

std::vector<Kind> kinds() {
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
  add("bf16_state", [](Kind& k) { k.format = StateFormat::kBf16; });
  add("q8_state", [](Kind& k) { k.format = StateFormat::kQ8; });
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
  return all;
}

std::vector<Kind> compressed_kinds() {
  std::vector<Kind> all = kinds();
  std::erase_if(all, [](const Kind& kind) {
    return kind.fake || kind.spill || kind.place == HostLinkPlace::kAtStore ||
           kind.name == "early" || kind.name == "many_slots" || kind.name == "five_threads" ||
           (kind.cached > 0 && kind.name != "half_in_memory");
  });
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].sparsity = {97, all[i].name != "naive" && all[i].name != "scratch"};
  }
  // Signs arrive as bf16, whatever the device's own type.
  for (const bool factors : {false, true}) {
    Kind signs;
    signs.name = factors ? "signs_with_factors" : "signs";
    signs.sparsity = {97, factors, true};
    all.push_back(signs);
  }
  return all;
}

compress::ValueEncoding form_of(DataType type) {
  for (const compress::ValueEncoding encoding :
       {compress::ValueEncoding::kF32, compress::ValueEncoding::kF16}) {
    if (compress::expanded_type(encoding) == type) return encoding;
  }
  return compress::ValueEncoding::kBf16;
}

class DeviceContract : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    layout_ = test_layout(GetParam().format, GetParam().spill ? type_bytes() : 0);
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
    options.slots = kind.slots;
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

  void create() {
    if (GetParam().fake) {
      fake_drive_ = std::make_shared<FakeDrive>();
      fake_drive_->layout = layout_;
      fake_drive_->committed.resize(layout_.subgroups.size());
      device_ = std::make_unique<FakeDevice>(fake_drive_, "drive-a", groups_);
      driver_.drive(*device_);
      const Status status = driver_.make_start(layout_);
      ASSERT_TRUE(status.ok()) << status.to_string();
      return;
    }
    if (GetParam().memory) {
      const auto size = EmulatedDrive::size_for(layout_, GetParam().durability);
      ASSERT_TRUE(size.ok()) << size.status().to_string();
      auto drive = EmulatedDrive::create(*size);
      ASSERT_TRUE(drive.ok()) << drive.status().to_string();
      drive_ = std::move(*drive);
    }
    auto made = GetParam().memory ? create_emulated_device(options(), layout_, *drive_)
                                  : create_local_device(options(), layout_);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    device_ = std::move(*made);
    driver_.drive(*device_);
    ASSERT_TRUE(driver_.cache_state(layout_, GetParam().cached).ok());
    const Status status = driver_.make_start(layout_);
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  void open() {
    device_.reset();
    if (GetParam().fake) {
      device_ = std::make_unique<FakeDevice>(fake_drive_, "drive-a", groups_);
    } else {
      auto opened = GetParam().memory ? open_emulated_device(options(), *drive_)
                                      : open_local_device(options());
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
  compress::RowColumnFactors factors(const storage::StoredSubgroup& subgroup, uint64_t step) const {
    const TestSparsity& sparsity = GetParam().sparsity;
    return sparsity.factors ? test_factors(matrices_, subgroup, step)
                            : compress::RowColumnFactors();
  }
  std::vector<std::byte> message(const storage::StoredSubgroup& subgroup, uint64_t step) const {
    const Kind& kind = GetParam();
    const auto gradient = test_gradient(subgroup, step, kind.gradient_type);
    std::vector<float> wide(subgroup.count);
    kernels::kernels().cast_to_f32(gradient.data(), kind.gradient_type, wide.data(), wide.size());
    compress::CompressedWriter writer;
    writer.begin(subgroup.id, subgroup.count,
                 kind.sparsity.signs ? compress::ValueEncoding::kSign : form_of(kind.gradient_type),
                 factors(subgroup, step));
    for (uint64_t first = 0; first < subgroup.count; first += base::kBlockElements) {
      const std::span<const float> block(wide.data() + first,
                                         std::min(base::kBlockElements, subgroup.count - first));
      std::vector<uint32_t> indices;
      std::vector<float> values;
      for (uint32_t i = 0; i < block.size(); i += static_cast<uint32_t>(kind.sparsity.every)) {
        indices.push_back(i);
        values.push_back(block[i]);
      }
      writer.add_block(indices, values);
    }
    const auto made = writer.finish();
    return {made.begin(), made.end()};
  }
  Status put_message(const storage::StoredSubgroup& subgroup, std::span<const std::byte> message) {
    return run(PutCompressedGradient{subgroup.id, message});
  }
  Update update_of(uint64_t step) {
    Update update;
    update.weights_type = GetParam().weights_type;
    update.scalars = test_scalars(step);
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

  bool faulty_ = false;  // the store's ring goes by faults_
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
  std::unique_ptr<Device> device_;
  std::vector<std::vector<std::byte>> weights_;
};

TEST_P(DeviceContract, GivesTheBitsOfThePlainReference) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  for (uint64_t number = 1; number <= 3; ++number) {
    step(number);
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_TRUE(weights_ ==
                reference.step(number, GetParam().gradient_type, GetParam().weights_type))
        << "weights of step " << number;
    finish_step(number);
    ASSERT_FALSE(HasFatalFailure());
  }
  expect_state(reference);
  open();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(device_->state().committed_step, 3u);
  EXPECT_EQ(device_->client_metadata(), "client metadata of step 3");
  expect_state(reference);
}

TEST_P(DeviceContract, GivesASnapshotOfTheCommittedStep) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const bool in_place = GetParam().durability == storage::Durability::kNone;
  for (uint64_t number = 1; number <= 2; ++number) {
    step(number);
    ASSERT_FALSE(HasFatalFailure());
    (void)reference.step(number, GetParam().gradient_type, GetParam().weights_type);
    finish_step(number);
    ASSERT_FALSE(HasFatalFailure());
  }
  ASSERT_TRUE(run(Flush{}).ok());
  auto opened = device_->snapshot();
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  Snapshot& snapshot = **opened;
  EXPECT_EQ(snapshot.name(), "drive-a");
  EXPECT_EQ(snapshot.state().committed_step, 2u);
  EXPECT_EQ(snapshot.choose_step(7).code(), base::ErrorCode::kInvalidArgument);
  ASSERT_TRUE(snapshot.choose_step(2).ok());
  EXPECT_EQ(snapshot.client_metadata(), "client metadata of step 2");
  // Also while the next step is updated: that goes elsewhere.
  for (const bool in_next_step : {false, true}) {
    if (in_next_step && in_place) break;
    if (in_next_step) step(3);
    ASSERT_FALSE(HasFatalFailure());
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) {
      for (size_t p = 0; p < layout_.planes.size(); ++p) {
        EXPECT_TRUE(plane_of(snapshot, i, p) == reference.plane(i, p))
            << "subgroup " << i << " plane " << p << " in the next step " << in_next_step;
      }
    }
  }
}

TEST_P(DeviceContract, TakesAStepBack) {
  if (GetParam().durability == storage::Durability::kNone) {
    GTEST_SKIP() << "in place: nothing can be aborted";
  }
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(run(Abort{1}).ok());
  expect_state(reference);
  // Prepared, then aborted.
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_TRUE(prepare(1).ok());
  ASSERT_TRUE(run(Abort{1}).ok());
  expect_state(reference);
  // Only gradients came; then the step again, whole.
  ASSERT_TRUE(run(BeginStep{1}).ok());
  put_all(1);
  ASSERT_TRUE(run(Abort{1}).ok());
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  expect_state(reference);
}

TEST_P(DeviceContract, StopsAnUpdateThatIsAborted) {
  if (GetParam().durability == storage::Durability::kNone) GTEST_SKIP() << "in place";
  if (GetParam().fake) GTEST_SKIP() << "an update ends within submit()";
  faulty_ = true;
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  ASSERT_TRUE(run(BeginStep{1}).ok());
  put_all(1);
  Command update{update_of(1)};
  Command back{Abort{1}};
  faults_.what = Faults::What::kHoldWrites;  // the update cannot end before the other command comes
  driver_.start(update);
  while (faults_.done == 0) std::this_thread::yield();
  driver_.start(back);
  faults_.what = Faults::What::kNothing;
  EXPECT_EQ(driver_.wait_for(update).code(), base::ErrorCode::kCancelled);
  EXPECT_TRUE(driver_.wait_for(back).ok());
  expect_state(reference);
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  expect_state(reference);
}

/// What ends an update reaches the device while the update waits for what is in flight before it.
TEST_P(DeviceContract, AnUpdateThatHasNotStartedIsStopped) {
  if (GetParam().durability == storage::Durability::kNone) GTEST_SKIP() << "in place";
  if (GetParam().fake) GTEST_SKIP() << "an update ends within submit()";
  faulty_ = true;
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const storage::StoredSubgroup& first = layout_.subgroups.front();
  const std::vector<float> ones(first.count, 1.0f);
  const auto wait_behind_a_write = [&](Update message, Message end, base::ErrorCode outcome) {
    ASSERT_TRUE(run(BeginStep{1}).ok());
    if (!message.as_completed) put_all(1);
    faults_.done = 0;
    faults_.what = Faults::What::kHoldWrites;
    Command write{WriteState{first.id, first.count, {ones.data()}}};
    Command update{std::move(message)};
    Command ending{std::move(end)};
    driver_.start(write);
    while (faults_.done == 0) std::this_thread::yield();
    driver_.start(update);
    driver_.start(ending);
    driver_.ready.clear();
    faults_.what = Faults::What::kNothing;
    EXPECT_TRUE(driver_.wait_for(write).ok());
    const Status status = driver_.wait_for(update);
    EXPECT_EQ(status.code(), outcome) << status.to_string();
    EXPECT_TRUE(driver_.wait_for(ending).ok());
    EXPECT_TRUE(driver_.ready.empty());
    EXPECT_TRUE(run(Abort{1}).ok());
    expect_state(reference);
  };
  wait_behind_a_write(update_of(1), Abort{1}, base::ErrorCode::kCancelled);
  if (device_->info().updates_as_completed.ok()) {
    Update early = update_of(1);  // of gradients that never come
    early.as_completed = true;
    wait_behind_a_write(early, Abort{1}, base::ErrorCode::kCancelled);
    wait_behind_a_write(early, StopUpdate{}, base::ErrorCode::kOk);
  }
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  expect_state(reference);
}

TEST_P(DeviceContract, RefusesCommandsOutOfOrder) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(prepare(1).code(), base::ErrorCode::kFailedPrecondition);
  EXPECT_EQ(run(Commit{1}).code(), base::ErrorCode::kFailedPrecondition);
  EXPECT_TRUE(run(Abort{1}).ok());
  ASSERT_TRUE(run(BeginStep{1}).ok());
  EXPECT_EQ(run(BeginStep{1}).code(), base::ErrorCode::kFailedPrecondition);

  Update update = update_of(1);
  const Status incomplete = run(update);
  EXPECT_EQ(incomplete.code(), base::ErrorCode::kFailedPrecondition);
  EXPECT_NE(incomplete.to_string().find("drive-a"), std::string::npos) << incomplete.to_string();

  const storage::StoredSubgroup& first = layout_.subgroups.front();
  const auto gradient = test_gradient(first, 1, GetParam().gradient_type);
  EXPECT_EQ(put({base::SubgroupId{0}, 0, first.count}, gradient, 0, 1).code(),
            base::ErrorCode::kInvalidArgument);
  EXPECT_EQ(put(first, gradient, first.count - 1, 2).code(), base::ErrorCode::kInvalidArgument);
  EXPECT_TRUE(put(first, gradient, 0, first.count).ok());
  EXPECT_EQ(put(first, gradient, 0, first.count).code(), base::ErrorCode::kInvalidArgument);
}

// Their replies may be lost on the way.
TEST_P(DeviceContract, ACommitAndAnAbortCanBeAskedForAgain) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(run(Commit{0}).ok());
  ReferenceModel reference(layout_, groups_);
  step(1);
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type);
  const auto expect_committed = [&] {
    EXPECT_TRUE(run(Commit{1}).ok());
    for (const uint64_t other : {0, 2}) {
      EXPECT_EQ(run(Commit{other}).code(), base::ErrorCode::kFailedPrecondition) << other;
    }
    EXPECT_EQ(device_->state().committed_step, 1u);
    EXPECT_EQ(device_->client_metadata(), "client metadata of step 1");
  };
  expect_committed();
  ASSERT_TRUE(run(BeginStep{2}).ok());
  expect_committed();
  for (int time = 0; time < 3; ++time) EXPECT_TRUE(run(Abort{2}).ok());
  EXPECT_EQ(run(Abort{1}).code(), base::ErrorCode::kFailedPrecondition) << "it is committed";
  expect_committed();
  expect_state(reference);
  open();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(run(Abort{2}).ok());
  expect_committed();
  step(2);  // none of it stands in the way
  ASSERT_TRUE(prepare(2).ok());
  EXPECT_TRUE(run(Commit{1}).ok());
  ASSERT_TRUE(run(Commit{2}).ok());
  reference.step(2, GetParam().gradient_type, GetParam().weights_type);
  expect_state(reference);
  if (GetParam().durability == storage::Durability::kStep) return;
  // In place: a step that has written cannot be aborted, however often it is asked for.
  step(3);
  for (int time = 0; time < 2; ++time) EXPECT_FALSE(run(Abort{3}).ok());
  EXPECT_FALSE(run(Commit{2}).ok()) << "what lies there is of no step";
}

TEST_P(DeviceContract, CountsWhatPasses) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  const base::TrafficReading host_before = device_->host_traffic();
  const base::TrafficReading store_before = device_->store_traffic();
  step(1);
  ASSERT_FALSE(HasFatalFailure());
  const base::TrafficReading host = device_->host_traffic().since(host_before);
  const base::TrafficReading store = device_->store_traffic().since(store_before);
  uint64_t elements = 0;
  uint64_t state_bytes = 0;
  for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
    elements += subgroup.count;
    for (const base::PlaneKind plane : layout_.planes) {
      state_bytes +=
          base::encoded_bytes(base::plane_encoding(layout_.format, plane), subgroup.count);
    }
  }
  // The store moves whole 4 KiB units: up to one more per plane and subgroup.
  const uint64_t slack = layout_.subgroups.size() * layout_.planes.size() * 4096;
  EXPECT_GE(store.up(base::TrafficKind::kState), state_bytes);
  EXPECT_LE(store.up(base::TrafficKind::kState), state_bytes + slack);
  if (!GetParam().held_back()) {
    EXPECT_EQ(store.up(base::TrafficKind::kState), store.down(base::TrafficKind::kState));
  }
  EXPECT_EQ(store.up(base::TrafficKind::kGradient), store.down(base::TrafficKind::kGradient));
  EXPECT_EQ(store.up(base::TrafficKind::kGradient) > 0, GetParam().spill);
  if (GetParam().place == HostLinkPlace::kAtStore) {
    EXPECT_EQ(host.up_bytes, store.up_bytes);
    EXPECT_EQ(host.down_bytes, store.down_bytes);
  } else {
    EXPECT_EQ(host.down(base::TrafficKind::kGradient), elements * type_bytes());
    EXPECT_EQ(host.up(base::TrafficKind::kWeight),
              elements * base::data_type_bytes(GetParam().weights_type));
    EXPECT_EQ(host.up_total(), host.up(base::TrafficKind::kWeight));
    EXPECT_EQ(host.down_total(), host.down(base::TrafficKind::kGradient));
  }
}

TEST_P(DeviceContract, ReadsAPieceOfOnePlane) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const storage::StoredSubgroup& subgroup = layout_.subgroups[1];
  std::vector<float> piece(1000, -1.0f);
  ReadState read;
  read.subgroup = subgroup.id;
  read.first = base::kBlockElements;
  read.count = piece.size() - 1;
  read.planes[0] = piece.data();
  ASSERT_TRUE(run(read).ok());
  const std::vector<float> whole = reference.plane(1, 0);
  EXPECT_TRUE(std::equal(piece.begin(), piece.end() - 1, whole.begin() + base::kBlockElements));
  EXPECT_EQ(piece.back(), -1.0f) << "wrote behind the end";
}

INSTANTIATE_TEST_SUITE_P(Kinds, DeviceContract, testing::ValuesIn(kinds()),
                         [](const auto& param) { return param.param.name; });

class CachedContract : public DeviceContract {};

std::vector<Kind> cached_kinds() {
  std::vector<Kind> all = kinds();
  std::erase_if(all, [](const Kind& kind) { return kind.cached == 0; });
  return all;
}

/// Bytes of state on the drive of those subgroups that are in memory, or of the others.
uint64_t state_bytes(const storage::StoreLayout& layout, uint64_t cached, bool in_memory) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < layout.subgroups.size(); ++i) {
    if (plan::stays_in_memory(i, cached, layout.subgroups.size()) != in_memory) continue;
    for (const base::PlaneKind plane : layout.planes) {
      bytes += base::round_up(base::encoded_bytes(base::plane_encoding(layout.format, plane),
                                                  layout.subgroups[i].count),
                              base::kIoAlignment);
    }
  }
  return bytes;
}

TEST_P(CachedContract, ReadsOnlyWhatIsNotInMemory) {
  const uint64_t cached = GetParam().cached;
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  const auto make_step = [&](uint64_t number) {
    step(number);
    finish_step(number);
    reference.step(number, GetParam().gradient_type, GetParam().weights_type);
  };
  make_step(1);
  EXPECT_EQ(device_->info().cached_subgroups, cached);
  EXPECT_EQ(device_->info().state_cache_bytes, state_bytes(layout_, cached, true));
  const uint64_t in_memory = state_bytes(layout_, cached, true);
  const uint64_t on_drive = state_bytes(layout_, cached, false);
  const uint64_t hits_before = device_->state_bytes_cached();
  const base::TrafficReading before = device_->store_traffic();
  const base::TrafficReading link_before = drive_link_->traffic();
  make_step(2);
  EXPECT_EQ(device_->state_bytes_cached() - hits_before, in_memory);
  const base::TrafficReading moved = device_->store_traffic().since(before);
  EXPECT_EQ(moved.up(base::TrafficKind::kState), on_drive);
  EXPECT_EQ(moved.down(base::TrafficKind::kState),
            GetParam().held_back() ? on_drive : on_drive + in_memory);
  if (GetParam().links) {
    EXPECT_EQ(drive_link_->traffic().since(link_before).up(base::TrafficKind::kState), on_drive);
  }
  // Asking for the state is served from memory too.
  const uint64_t read_before = device_->store_traffic().up(base::TrafficKind::kState);
  expect_state(reference);
  EXPECT_EQ(device_->store_traffic().up(base::TrafficKind::kState) - read_before, on_drive);
  if (GetParam().held_back()) return;
  // The committed state is asked for while memory holds the one after it.
  step(3);
  ASSERT_FALSE(HasFatalFailure());
  expect_state(reference);
}

// A write from outside takes the place of what lies in memory, plane by plane.
TEST_P(CachedContract, AWriteReplacesWhatIsInMemory) {
  create();
  ASSERT_FALSE(HasFatalFailure());
  step(1);
  finish_step(1);
  const auto read = [&](size_t i, std::vector<std::vector<float>>& planes) {
    ReadState command;
    command.subgroup = layout_.subgroups[i].id;
    command.count = layout_.subgroups[i].count;
    planes.assign(3, std::vector<float>(command.count));
    for (size_t p = 0; p < 3; ++p) command.planes[p] = planes[p].data();
    ASSERT_TRUE(run(command).ok());
  };
  std::vector<std::vector<std::vector<float>>> before(layout_.subgroups.size());
  for (size_t i = 0; i < before.size(); ++i) read(i, before[i]);
  ASSERT_TRUE(run(BeginStep{2}).ok());
  for (size_t i = 0; i < before.size(); ++i) {
    WriteState write;
    write.subgroup = layout_.subgroups[i].id;
    write.count = layout_.subgroups[i].count;
    write.plane_mask = 1;
    for (float& value : before[i][0]) value += 1;
    write.planes[0] = before[i][0].data();
    ASSERT_TRUE(run(write).ok());
  }
  finish_step(2);
  const auto expect_planes = [&] {
    for (size_t i = 0; i < before.size(); ++i) {
      std::vector<std::vector<float>> now;
      read(i, now);
      EXPECT_TRUE(now == before[i]) << "subgroup " << i;
    }
  };
  expect_planes();
  if (GetParam().held_back()) {
    ASSERT_TRUE(run(Flush{}).ok());
  }
  open();
  ASSERT_FALSE(HasFatalFailure());
  expect_planes();
  step(3);  // from planes that come from memory and from the drive
  finish_step(3);
}

/// What a process leaves that ends here without a word, opened by another one: a copy of the drive.
base::Result<std::unique_ptr<EmulatedDrive>> copy_of(EmulatedDrive& drive,
                                                     const storage::StoreLayout& layout,
                                                     const LocalDeviceOptions& options) {
  SI_ASSIGN_OR_RETURN(auto copy, EmulatedDrive::create(drive.size_bytes()));
  // Makes it a drive that holds a store; its contents are the other one's then.
  SI_RETURN_IF_ERROR(create_emulated_device(options, layout, *copy).status());
  std::copy(drive.contents().begin(), drive.contents().end(), copy->contents().begin());
  return copy;
}

// What is in memory only is written when asked for and at the end; before that, what a crash leaves
// is known for what it is.
TEST_P(CachedContract, StateInMemoryOnlyIsTornUntilItIsFlushed) {
  if (!GetParam().held_back() || !GetParam().memory) GTEST_SKIP() << "every step is written";
  create();
  ASSERT_FALSE(HasFatalFailure());
  ReferenceModel reference(layout_, groups_);
  for (uint64_t number = 1; number <= 2; ++number) {
    step(number);
    finish_step(number);
    reference.step(number, GetParam().gradient_type, GetParam().weights_type);
    const auto left = copy_of(*drive_, layout_, options());
    ASSERT_TRUE(left.ok()) << left.status().to_string();
    EXPECT_TRUE((*left)->summarize()->state.torn);
    auto opened = open_emulated_device(options(), **left);
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    const Status refused = (*opened)->recover_to(number);
    EXPECT_EQ(refused.code(), base::ErrorCode::kFailedPrecondition) << refused.to_string();
  }
  // Not in the middle of a step.
  ASSERT_TRUE(run(BeginStep{3}).ok());
  EXPECT_EQ(run(Flush{}).code(), base::ErrorCode::kFailedPrecondition);
  ASSERT_TRUE(run(Abort{3}).ok());
  const uint64_t written = device_->store_traffic().down(base::TrafficKind::kState);
  ASSERT_TRUE(run(Flush{}).ok());
  EXPECT_EQ(device_->store_traffic().down(base::TrafficKind::kState) - written,
            state_bytes(layout_, GetParam().cached, true));
  {
    const auto left = copy_of(*drive_, layout_, options());
    ASSERT_TRUE(left.ok()) << left.status().to_string();
    EXPECT_FALSE((*left)->summarize()->state.torn);
    auto opened = open_emulated_device(options(), **left);
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    ASSERT_TRUE((*opened)->recover_to(2).ok());
    driver_.drive(**opened);
    expect_state(reference);
    driver_.drive(*device_);
  }
  // A second flush has nothing to do, and the cache is as good as before.
  ASSERT_TRUE(run(Flush{}).ok());
  step(3);
  finish_step(3);
  reference.step(3, GetParam().gradient_type, GetParam().weights_type);
  // Closed in a step that has gradients and nothing else.
  ASSERT_TRUE(run(BeginStep{4}).ok());
  put_all(4);
  open();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(device_->state().committed_step, 3u);
  expect_state(reference);
}

INSTANTIATE_TEST_SUITE_P(Kinds, CachedContract, testing::ValuesIn(cached_kinds()),
                         [](const auto& param) { return param.param.name; });

class CompressedContract : public DeviceContract {};

TEST_P(CompressedContract, GivesTheBitsOfThePlainReference) {
  create();
  ReferenceModel reference(layout_, groups_);
  uint64_t sent = 0;
  const uint64_t before = device_->host_traffic().down(base::TrafficKind::kGradient);
  for (uint64_t number = 1; number <= 3; ++number) {
    ASSERT_TRUE(run(BeginStep{number}).ok());
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      const auto bytes = message(subgroup, number);
      sent += bytes.size();
      const Status status = put_message(subgroup, bytes);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    Update update = update_of(number);
    // Samples of the variance are wanted too, where the device knows what they are of.
    std::vector<base::Bf16> samples(compress::sample_count(matrices_));
    for (SubgroupUpdate& entry : update.updates) {
      if (GetParam().sparsity.factors) entry.samples_out = samples.data();
    }
    const uint64_t up = device_->host_traffic().up(base::TrafficKind::kWeight);
    const Status status = run(update);
    ASSERT_TRUE(status.ok()) << status.to_string();
    finish_step(number);
    const auto expected = reference.step(number, GetParam().gradient_type, GetParam().weights_type,
                                         GetParam().sparsity);
    std::vector<base::Bf16> expected_samples(samples.size());
    uint64_t expected_up = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      expected_up += expected[i].size();
      if (!GetParam().sparsity.factors) continue;
      const storage::StoredSubgroup& subgroup = layout_.subgroups[i];
      compress::take_samples(matrices_, subgroup.first_element, reference.plane(i, 2),
                             expected_samples.data());
      expected_up += compress::samples_in(matrices_, subgroup.first_element, subgroup.count) *
                     sizeof(base::Bf16);
    }
    EXPECT_EQ(device_->host_traffic().up(base::TrafficKind::kWeight) - up, expected_up);
    EXPECT_TRUE(std::equal(samples.begin(), samples.end(), expected_samples.begin(),
                           [](base::Bf16 a, base::Bf16 b) { return a.bits == b.bits; }));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(weights_[i] == expected[i]) << "step " << number << " subgroup " << i;
    }
  }
  expect_state(reference);
  EXPECT_EQ(device_->host_traffic().down(base::TrafficKind::kGradient) - before, sent);
  open();
  expect_state(reference);
}

TEST_P(CompressedContract, RefusesABadMessageAndLeavesTheStepAsItWas) {
  create();
  ReferenceModel reference(layout_, groups_);
  ASSERT_TRUE(run(BeginStep{1}).ok());
  const storage::StoredSubgroup& subgroup = layout_.subgroups.front();
  const auto good = message(subgroup, 1);
  auto bad = good;
  bad[good.size() / 2] ^= std::byte{4};
  EXPECT_EQ(put_message(subgroup, bad).code(), base::ErrorCode::kCorrupt);
  EXPECT_EQ(put_message(subgroup, std::span(good).first(good.size() - 1)).code(),
            base::ErrorCode::kCorrupt);
  EXPECT_EQ(put_message(layout_.subgroups[1], good).code(), base::ErrorCode::kInvalidArgument);
  const std::vector<std::byte> dense(subgroup.count * type_bytes());
  EXPECT_EQ(put(subgroup, dense, 0, subgroup.count).code(), base::ErrorCode::kInvalidArgument);
  if (GetParam().sparsity.factors) {
    compress::CompressedWriter writer;
    writer.begin(subgroup.id, subgroup.count, compress::ValueEncoding::kBf16,
                 {.values = std::vector<float>(7, 1.0f), .runs = {3, 4}});
    for (uint64_t first = 0; first < subgroup.count; first += base::kBlockElements) {
      writer.add_block({}, {});
    }
    const Status other_matrices = put_message(subgroup, writer.finish());
    EXPECT_EQ(other_matrices.code(), base::ErrorCode::kInvalidArgument);
    EXPECT_NE(other_matrices.what().find("7 factors"), std::string::npos)
        << other_matrices.to_string();
    // As many as there should be, but of other rows and columns.
    compress::RowColumnFactors factors = test_factors(matrices_, subgroup, 1);
    ASSERT_GT(factors.runs[0], 1u);
    --factors.runs[0];
    ++factors.runs[1];
    writer.begin(subgroup.id, subgroup.count, compress::ValueEncoding::kBf16, factors);
    for (uint64_t first = 0; first < subgroup.count; first += base::kBlockElements) {
      writer.add_block({}, {});
    }
    EXPECT_EQ(put_message(subgroup, writer.finish()).code(), base::ErrorCode::kInvalidArgument);
  }
  // None of them stands in the way of the right one.
  for (const storage::StoredSubgroup& each : layout_.subgroups) {
    ASSERT_TRUE(put_message(each, message(each, 1)).ok());
  }
  EXPECT_EQ(put_message(subgroup, good).code(), base::ErrorCode::kInvalidArgument);
  Update update = update_of(1);
  ASSERT_TRUE(run(update).ok());
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type, GetParam().sparsity);
  expect_state(reference);
}

INSTANTIATE_TEST_SUITE_P(Kinds, CompressedContract, testing::ValuesIn(compressed_kinds()),
                         [](const auto& param) { return param.param.name; });

/// Residuals lie behind the rule's planes; an update neither reads nor writes them.
TEST(Residual, IsWrittenByItselfAndKeptThroughUpdates) {
  storage::StoreLayout layout = test_layout(StateFormat::kQ8, 0, 2);
  layout.planes.push_back(base::PlaneKind::kResidual);
  auto drive = EmulatedDrive::create(*EmulatedDrive::size_for(layout, storage::Durability::kStep));
  ASSERT_TRUE(drive.ok());
  LocalDeviceOptions options;
  options.name = options.path = "drive-a";
  options.slots = 2;
  auto made = create_emulated_device(options, layout, **drive);
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  Device& device = **made;
  DeviceDriver driver;
  driver.drive(device);
  const auto residual_of = [&](const storage::StoredSubgroup& subgroup, uint64_t step) {
    std::vector<base::Bf16> residual(subgroup.count);
    const auto wide = random_floats(subgroup.count, step, 1.0f);
    for (size_t i = 0; i < wide.size(); ++i) residual[i] = base::to_bf16(wide[i]);
    return residual;
  };
  const auto expect_residual = [&](uint64_t of_step) {
    for (const storage::StoredSubgroup& subgroup : layout.subgroups) {
      std::vector<float> found(subgroup.count);
      ReadState read;
      read.subgroup = subgroup.id;
      read.count = subgroup.count;
      read.planes[3] = found.data();
      ASSERT_TRUE(driver.run(read).ok());
      const auto expected = residual_of(subgroup, of_step);
      for (size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(found[i], of_step == 0 ? 0.0f : base::to_f32(expected[i]));
      }
    }
  };
  ASSERT_TRUE(driver.make_start(layout).ok());
  uint64_t kept = 0;
  for (uint64_t step = 1; step <= 5; ++step) {
    ASSERT_TRUE(driver.run(BeginStep{step}).ok());
    ASSERT_TRUE(driver.put_all(layout, step).ok());
    const auto before = device.store_traffic();
    ASSERT_TRUE(driver.update(layout, step).ok());
    const auto moved = device.store_traffic().since(before);
    EXPECT_EQ(moved.up(base::TrafficKind::kState), moved.down(base::TrafficKind::kState));
    if (step != 3) {  // a step that leaves it alone
      const uint64_t down = device.host_traffic().down(base::TrafficKind::kState);
      uint64_t bytes = 0;
      for (const storage::StoredSubgroup& subgroup : layout.subgroups) {
        const auto residual = residual_of(subgroup, step);
        WriteState write;
        write.subgroup = subgroup.id;
        write.count = subgroup.count;
        write.plane_mask = 1u << 3;
        write.residual = residual.data();
        ASSERT_TRUE(driver.run(write).ok());
        bytes += subgroup.count * 2;
      }
      EXPECT_EQ(device.host_traffic().down(base::TrafficKind::kState) - down, bytes);
    }
    ASSERT_TRUE(driver.prepare(step).ok());
    if (step == 4) {  // never was
      ASSERT_TRUE(driver.run(Abort{step}).ok());
      expect_residual(kept);
      break;
    }
    ASSERT_TRUE(driver.run(Commit{step}).ok());
    if (step != 3) kept = step;
    expect_residual(kept);
  }
}

}  // namespace
}  // namespace smartinf::csd
