// The folder of a checkpoint: what is in it, what may be deleted, what it takes the place of, and
// that it is durable before it counts. The same in every state format.
#include "smartinf/engine/checkpoint_folder.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "smartinf/engine/checkpoint_test_model.h"

namespace {

/// Told what makes names and contents durable, in place of the C library's functions.
std::function<void(const std::string& call, const std::string& path)> watched_calls;

void tell(const char* call, const std::string& path) {
  if (!watched_calls) return;
  const auto watched = std::exchange(watched_calls, nullptr);  // it makes such calls itself
  watched(call, path);
  watched_calls = watched;
}

}  // namespace

extern "C" {
int fsync(int file) {
  std::error_code error;
  tell("fsync",
       std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", file), error).string());
  return static_cast<int>(::syscall(SYS_fsync, file));
}
int rename(const char* from, const char* to) noexcept {
  const auto done = static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
  const int why = errno;
  if (done == 0) tell("rename", from);
  errno = why;
  return done;
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned int flags) noexcept {
  const auto done =
      static_cast<int>(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
  const int why = errno;
  if (done == 0) tell("exchange", from);
  errno = why;
  return done;
}
int unlink(const char* path) noexcept {
  tell("unlink", path);
  return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}
}

namespace smartinf::engine {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class CheckpointFolderTest : public CheckpointTest {
 protected:
  /// Another run at the same step, with the same state.
  void restore_to(const std::string& name) {
    StoredRun run = snapshot();
    ReshardOptions copy;
    copy.format = GetParam();
    const auto made = reshard(run, devices({name}), copy);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
  }
  CheckpointSummary checkpoint_at(const std::string& name, bool replace = false) {
    StoredRun run = snapshot();
    CheckpointOptions options;
    options.path = path(name);
    options.replace = replace;
    auto made = write_checkpoint(run, options);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    return made.ok() ? *made : CheckpointSummary{};
  }
  void write(const fs::path& file, const std::string& text) {
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::string read(const std::string& file) {
    std::ifstream in(file);
    return {std::istreambuf_iterator<char>(in), {}};
  }
};

TEST_P(CheckpointFolderTest, TwoRunsShareAFolder) {
  restore_to("c");
  for (int round = 0; round < 8; ++round) {
    CheckpointOptions options;
    options.folder = path("checkpoints");
    std::array<base::Result<CheckpointSummary>, 2> made = {base::Status(ErrorCode::kIo, ""),
                                                           base::Status(ErrorCode::kIo, "")};
    std::array<storage::RunId, 2> ids;
    {
      std::array<std::jthread, 2> runs;
      for (size_t i = 0; i < 2; ++i) {
        runs[i] = std::jthread([&, i] {
          auto run = i == 0 ? updater_->snapshot()
                            : open_stored_run(devices({"c"}), storage::ReaderLock::kTake);
          ids[i] = run->layout().run;
          made[i] = write_checkpoint(*run, options);
        });
      }
    }
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(made[i].ok()) << made[i].status().to_string();
      const auto kept = read_checkpoint(made[i]->path);
      ASSERT_TRUE(kept.ok()) << kept.status().to_string();
      EXPECT_EQ(kept->run, ids[i]);
      const auto opened = open_checkpoint(*kept);
      EXPECT_TRUE(opened.ok()) << opened.status().to_string();
    }
    EXPECT_EQ(std::distance(fs::directory_iterator(options.folder), {}), 2);
    fs::remove_all(options.folder);
  }
}

TEST_P(CheckpointFolderTest, DevicesOfAnotherCheckpointAreRefused) {
  const CheckpointSummary first = checkpoint_at("first");
  restore_to("c");
  step(*updater_, 4);
  const CheckpointSummary later = checkpoint_at("later");
  auto other_run = stored({path("c")});
  CheckpointOptions options;
  options.path = path("other");
  ASSERT_TRUE(write_checkpoint(other_run, options).ok());

  const auto refused = [&](const std::string& name, const std::string& why) {
    const auto kept = read_checkpoint(path(name));
    ASSERT_TRUE(kept.ok()) << kept.status().to_string();
    const base::Status status = check_devices(*kept);
    EXPECT_EQ(status.code(), ErrorCode::kMismatch) << name;
    EXPECT_THAT(status.to_string(), HasSubstr(why));
    EXPECT_EQ(open_checkpoint(*kept).status().code(), ErrorCode::kMismatch) << name;
  };
  const auto copy = [&](const std::string& from, const std::string& to) {
    fs::copy(path(from), path(to), fs::copy_options::recursive);
  };
  copy("first", "sound");
  EXPECT_TRUE(check_devices(*read_checkpoint(path("sound"))).ok());

  copy("first", "with_description_of_other");
  fs::remove(path("with_description_of_other/checkpoint.json"));
  copy("other/checkpoint.json", "with_description_of_other/checkpoint.json");
  refused("with_description_of_other", "of run");

  copy("first", "with_one_of_later");
  fs::remove_all(path("with_one_of_later/device-1"));
  copy("later/device-1", "with_one_of_later/device-1");
  refused("with_one_of_later", "step 4");

  copy("first", "with_all_of_later");
  for (const std::string& device : paths({"device-0", "device-1"})) {
    const std::string name = "/" + fs::path(device).filename().string();
    fs::remove_all(path("with_all_of_later" + name));
    copy("later" + name, "with_all_of_later" + name);
  }
  refused("with_all_of_later", "step 4");

  copy("first", "crossed");
  fs::rename(path("crossed/device-0"), path("crossed/x"));
  fs::rename(path("crossed/device-1"), path("crossed/device-0"));
  fs::rename(path("crossed/x"), path("crossed/device-1"));
  refused("crossed", "number 1 of 2");
}

TEST_P(CheckpointFolderTest, IsNoPlaceToTrainOn) {
  updater_.reset();
  const CheckpointSummary made = checkpoint(stored(paths({"a", "b"})));
  UpdaterOptions inside = options_;
  inside.devices[0].path = made.path + "/device-0";
  inside.devices[1].path = made.path + "/device-1/";
  const auto opened = Updater::open(inside, space_);
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.status().code(), ErrorCode::kFailedPrecondition);
  EXPECT_THAT(opened.status().to_string(), HasSubstr("smartinf restore " + made.path));
  EXPECT_TRUE(open_checkpoint(*read_checkpoint(made.path)).ok());
}

TEST_P(CheckpointFolderTest, WhatIsLeftOfAPartialOneIsTold) {
  const std::string run = "-0a1b2c3d-1234.partial";
  for (const std::string& name :
       {"step-00000007" + run, "smartinf" + run, std::string("step-00000007.partial"),
        std::string("step-00000007-0a1b2c3d.partial")}) {
    const std::string folder = path("kept/" + name);
    fs::create_directories(folder);
    EXPECT_EQ(look_at_partial(folder), PartialFolder::kLeftover) << name;
    write(folder + "/device-0/smartinf.state.creating", "x");
    write(folder + "/device-12/smartinf.state", "x");
    write(folder + "/rank-1" + run + "/device-0/smartinf.state", "x");
    write(folder + "/rank-0/checkpoint.json", "x");
    EXPECT_EQ(look_at_partial(folder), PartialFolder::kLeftover) << name;
    {
      const storage::FileDescriptor lock(::open(folder.c_str(), O_RDONLY | O_DIRECTORY));
      ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
      EXPECT_EQ(look_at_partial(folder), PartialFolder::kInUse);
      EXPECT_EQ(remove_partial(folder).code(), ErrorCode::kBusy);
    }
    for (const std::string foreign :
         {"/thesis.tex", "/device-0/notes", "/device-0/more/smartinf.state",
          "/device-x/smartinf.state", "/rank-0/rank-1/checkpoint.json"}) {
      write(folder + foreign, "work");
      EXPECT_EQ(look_at_partial(folder), PartialFolder::kForeign) << foreign;
      EXPECT_EQ(remove_partial(folder).code(), ErrorCode::kFailedPrecondition);
      EXPECT_EQ(read(folder + foreign), "work");
      EXPECT_TRUE(fs::exists(folder + "/device-0/smartinf.state.creating"));
      fs::remove(folder + foreign);
      const fs::path parent = fs::path(folder + foreign).parent_path();
      if (fs::is_empty(parent)) fs::remove(parent);
      if (fs::exists(folder + "/rank-0/rank-1")) fs::remove(folder + "/rank-0/rank-1");
    }
    fs::create_directory_symlink(path("a"), folder + "/device-3");
    EXPECT_EQ(look_at_partial(folder), PartialFolder::kForeign) << "a link";
    fs::remove(folder + "/device-3");
    const base::Status removed = remove_partial(folder);
    EXPECT_TRUE(removed.ok()) << removed.to_string();
    EXPECT_FALSE(fs::exists(folder));
  }
  for (const char* name : {"step-1-draft.partial", "step-00000007", "work.partial", "step-.partial",
                           "x-0a1b2c3-1234.partial", "x-0a1b2c3d-.partial", "x-0a1b2c3d.partial"}) {
    fs::create_directories(path(std::string("kept/") + name));
    EXPECT_EQ(look_at_partial(path(std::string("kept/") + name)), PartialFolder::kForeign) << name;
  }
}

TEST_P(CheckpointFolderTest, LeftoversOfTheRunGoWithItsNextCheckpoint) {
  const std::string run = snapshot().layout().run.to_string().substr(0, 8);
  const std::string ours = path("checkpoints/step-00000002-" + run + "-1.partial");
  const std::string others = path("checkpoints/step-00000002-00000000-1.partial");
  const std::string with_more = path("checkpoints/step-00000001-" + run + "-1.partial");
  for (const std::string& each : {ours, others, with_more})
    write(each + "/device-0/smartinf.state", "x");
  write(with_more + "/notes", "work");
  checkpoint(snapshot());
  EXPECT_FALSE(fs::exists(ours));
  EXPECT_TRUE(fs::exists(others));
  EXPECT_EQ(read(with_more + "/notes"), "work");
  // An old checkpoint that somebody has put something into is not deleted with it.
  write(path("checkpoints/step-00000003/notes"), "work");
  step(*updater_, 4);
  EXPECT_TRUE(checkpoint(snapshot(), 1).removed.empty());
  EXPECT_EQ(read(path("checkpoints/step-00000003/notes")), "work");
}

TEST_P(CheckpointFolderTest, TakesThePlaceOfAnother) {
  checkpoint_at("kept");
  StoredRun run = snapshot();
  CheckpointOptions options;
  options.path = path("kept/");
  EXPECT_EQ(write_checkpoint(run, options).status().code(), ErrorCode::kAlreadyExists);
  step(*updater_, 4);
  EXPECT_EQ(checkpoint_at("kept", true).step, 4u);
  EXPECT_TRUE(open_checkpoint(*read_checkpoint(path("kept"))).ok());
  EXPECT_EQ(fs::exists(path("kept/device-0/smartinf.state")), true);
  fs::create_directory(path("empty"));
  checkpoint_at("empty");
  // Files of others that lie there are not ours to delete.
  write(path("kept/notes"), "work");
  options.replace = true;
  const auto refused = write_checkpoint(run, options);
  EXPECT_EQ(refused.status().code(), ErrorCode::kAlreadyExists);
  EXPECT_THAT(refused.status().to_string(), HasSubstr("kept/notes"));
  EXPECT_EQ(read_checkpoint(path("kept"))->step, 4u);
  for (const auto& entry : fs::directory_iterator(folder_)) {
    EXPECT_FALSE(entry.path().string().ends_with(kPartialSuffix)) << entry.path();
  }
}

// A power cut leaves what was synced: files before folders, folders before their name, the name
// before the old one goes. At no moment is there neither the old one nor the new one.
TEST_P(CheckpointFolderTest, IsDurableBeforeItCounts) {
  fs::create_directory(path("new"));
  const std::string kept = path("new/run/kept");
  const auto record = [&](bool replace) {
    std::vector<std::string> calls;
    watched_calls = [&](const std::string& call, const std::string& on) {
      if (on.starts_with(folder_.string() + "/new") || on == folder_.string()) {
        calls.push_back(call + " " + on.substr(folder_.string().size()));
      }
      if (replace) {
        const auto there = read_checkpoint(kept);
        EXPECT_TRUE(there.ok() && check_devices(*there).ok()) << "at " << call << " " << on;
      }
    };
    checkpoint_at("new/run/kept", replace);
    watched_calls = nullptr;
    return calls;
  };
  const std::string run = snapshot().layout().run.to_string().substr(0, 8);
  const std::string partial = fmt::format("/new/run/kept-{}-{}.partial", run, ::getpid());
  const auto place_of = [](const std::vector<std::string>& calls, const std::string& call) {
    const auto found = std::find(calls.rbegin(), calls.rend(), call);
    EXPECT_NE(found, calls.rend()) << call << " in\n" << ::testing::PrintToString(calls);
    return calls.rend() - found;
  };
  for (const bool replace : {false, true}) {
    const std::vector<std::string> calls = record(replace);
    const auto named = place_of(calls, (replace ? "exchange " : "rename ") + partial);
    for (const std::string inside : {"/device-0/smartinf.state", "/device-1/smartinf.state",
                                     "/device-0", "/device-1", "/checkpoint.json", ""}) {
      const auto synced = place_of(calls, "fsync " + partial + inside);
      EXPECT_LT(synced, named) << inside;
    }
    const auto parent = place_of(calls, "fsync /new/run");
    EXPECT_GT(parent, named);
    if (replace) {
      EXPECT_GT(place_of(calls, "unlink " + partial + "/checkpoint.json"), parent);
      EXPECT_GT(place_of(calls, "unlink " + partial + "/device-1/smartinf.state"), parent);
    } else {
      place_of(calls, "fsync /new");  // which holds the name of the folder that was made
    }
    step(*updater_, 4);
  }
}

TEST_P(CheckpointFolderTest, OfSeveralRanksIsWholeOrRefused) {
  restore_to("c");
  const auto part = [&](const std::string& at, const std::vector<std::string>& devices) {
    StoredRun run = stored(devices, storage::ReaderLock::kLeave);
    CheckpointOptions options;
    options.path = at;
    const auto made = write_checkpoint(run, options);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    return run.layout().run;
  };
  const auto both = [&](const std::string& name, bool replace) {
    auto ranks = RanksCheckpoint::begin(path(name), replace, storage::RunId{});
    ASSERT_TRUE(ranks.ok()) << ranks.status().to_string();
    part(rank_folder(ranks->folder(), 0), paths({"a", "b"}));
    EXPECT_EQ(ranks->finish(2, "text").code(), ErrorCode::kNotFound) << "rank 1 is still missing";
    part(rank_folder(ranks->folder(), 1), {path("c")});
    const base::Status status = ranks->finish(2, "text");
    EXPECT_TRUE(status.ok()) << status.to_string();
  };
  both("first", false);
  auto kept = read_checkpoint(path("first"));
  ASSERT_TRUE(kept.ok()) << kept.status().to_string();
  ASSERT_EQ(kept->ranks.size(), 2u);
  EXPECT_EQ(kept->trainer, "text");
  EXPECT_EQ(kept->step, 3u);
  for (const Checkpoint& rank : kept->ranks) EXPECT_TRUE(open_checkpoint(rank).ok());
  EXPECT_EQ(open_checkpoint(*kept).status().code(), ErrorCode::kUnsupported);
  EXPECT_EQ(RanksCheckpoint::begin(path("first"), false, storage::RunId{}).status().code(),
            ErrorCode::kAlreadyExists);
  {
    auto given_up = RanksCheckpoint::begin(path("given_up"), false, storage::RunId{});
    part(rank_folder(given_up->folder(), 0), paths({"a", "b"}));
  }
  step(*updater_, 4);
  both("later", false);
  both("first", true);
  fs::rename(path("later/rank-1"), path("later/x"));
  EXPECT_EQ(read_checkpoint(path("later")).status().code(), ErrorCode::kNotFound);
  fs::rename(path("first/rank-0"), path("later/rank-1"));
  const auto mixed = read_checkpoint(path("later"));
  EXPECT_EQ(mixed.status().code(), ErrorCode::kMismatch) << mixed.status().to_string();
  for (const auto& entry : fs::directory_iterator(folder_)) {
    EXPECT_FALSE(entry.path().string().ends_with(kPartialSuffix)) << entry.path();
  }
}

TEST_P(CheckpointFolderTest, AStateIsReplacedByAWholeOneOnly) {
  const CheckpointSummary made = checkpoint_at("kept");
  step(*updater_, 4);
  const auto at_four = state(*updater_);
  updater_.reset();
  const auto kept = read_checkpoint(made.path);
  StoredRun from = *open_checkpoint(*kept);
  ReshardOptions replace;
  replace.format = GetParam();
  replace.replace = true;
  const auto old_is_untouched = [&] {
    EXPECT_EQ(stored(paths({"a", "b"})).step, 4u);
    for (const std::string& target : paths({"a", "b"})) {
      for (const auto& entry : fs::directory_iterator(target)) {
        EXPECT_FALSE(entry.is_directory()) << entry.path();
      }
    }
  };
  // A place that takes nothing, found when the others are ready; a copy that is stopped; a rename
  // that fails when the first has been exchanged.
  write(path("file"), "x");
  EXPECT_FALSE(reshard(from, devices({"a", "file"}), replace).ok());
  old_is_untouched();
  replace.progress = [](uint64_t done, uint64_t total) {
    return done < total ? base::Status() : base::Status(ErrorCode::kCancelled, "enough");
  };
  EXPECT_EQ(reshard(from, devices({"a", "b"}), replace).status().code(), ErrorCode::kCancelled);
  old_is_untouched();
  replace.progress = {};
  int exchanges = 0;
  watched_calls = [&](const std::string& call, const std::string&) {
    if (call == "exchange" && ++exchanges == 1)
      fs::rename(path("b/smartinf.state"), path("hidden"));
    if (call == "exchange" && exchanges == 2) fs::rename(path("hidden"), path("b/smartinf.state"));
  };
  const auto failed = reshard(from, devices({"a", "b"}), replace);
  watched_calls = nullptr;
  EXPECT_EQ(failed.status().code(), ErrorCode::kNotFound) << failed.status().to_string();
  EXPECT_EQ(exchanges, 2) << "the first is aborted";
  old_is_untouched();
  const auto many = reshard(from, devices({"a", "b", "c", "d", "e", "f", "g", "h", "i"}), replace);
  EXPECT_THAT(many.status().to_string(), HasSubstr("Leave this place out"));
  old_is_untouched();
  updater_ = open(options_);
  EXPECT_EQ(state(*updater_), at_four);
  EXPECT_EQ(reshard(from, devices({"a", "b"}), replace).status().code(), ErrorCode::kBusy);
  updater_.reset();

  const auto done = reshard(from, devices({"a", "c"}), replace);
  ASSERT_TRUE(done.ok()) << done.status().to_string();
  const StoredRun now = stored(paths({"a", "c"}));
  EXPECT_EQ(now.step, 3u);
  EXPECT_EQ(now.layout().run, done->run);
  EXPECT_FALSE(fs::exists(path("a/smartinf.replacement")));
}

TEST_P(CheckpointFolderTest, AFlippedBitInTheDescriptionIsFound) {
  const CheckpointSummary made = checkpoint(snapshot());
  const std::string file = made.path + "/" + std::string(kCheckpointFile);
  const auto right = read_checkpoint(made.path);
  ASSERT_TRUE(right.ok());
  uint64_t found = 0;
  for (uint64_t bit = 0; bit < 8 * fs::file_size(file); ++bit) {
    const auto flip = [&] {
      std::fstream text(file, std::ios::in | std::ios::out | std::ios::binary);
      text.seekg(static_cast<std::streamoff>(bit / 8));
      const int byte = text.get();
      text.seekp(static_cast<std::streamoff>(bit / 8));
      text.put(static_cast<char>(byte ^ (1 << bit % 8)));
    };
    flip();
    const auto read = read_checkpoint(made.path);
    if (!read.ok()) {
      ++found;
      EXPECT_EQ(read.status().code(), ErrorCode::kCorrupt);
    } else {
      // Between the words, or in the name of what is not needed.
      EXPECT_EQ(read->step, right->step) << "bit " << bit;
      EXPECT_EQ(read->run, right->run) << "bit " << bit;
      EXPECT_EQ(read->devices, right->devices) << "bit " << bit;
    }
    flip();
  }
  EXPECT_GT(found, 4 * fs::file_size(file));
  EXPECT_TRUE(read_checkpoint(made.path).ok());
}

TEST_P(CheckpointFolderTest, ADescriptionThatIsNoneIsRefusedAtOnce) {
  const CheckpointSummary made = checkpoint(snapshot());
  const std::string file = made.path + "/" + std::string(kCheckpointFile);
  nlohmann::json right = nlohmann::json::parse(std::ifstream(file));
  right.erase("checksum");
  const auto write = [&](const nlohmann::json& json) { std::ofstream(file) << json.dump(); };
  write(right);
  EXPECT_TRUE(read_checkpoint(made.path).ok()) << "the first versions wrote no checksum";
  for (const auto& [key, wrong] :
       std::vector<std::pair<std::string, nlohmann::json>>{{"created_seconds", "x"},
                                                           {"created_seconds", -1},
                                                           {"created_seconds", nullptr},
                                                           {"trainer", 7},
                                                           {"run", {1, 2}},
                                                           {"step", "3"},
                                                           {"step", -3},
                                                           {"devices", "2"},
                                                           {"devices", 0},
                                                           {"ranks", 1},
                                                           {"ranks", {1}},
                                                           {"checksum", 5}}) {
    nlohmann::json spoilt = right;
    spoilt[key] = wrong;
    write(spoilt);
    EXPECT_EQ(read_checkpoint(made.path).status().code(), ErrorCode::kCorrupt) << spoilt.dump();
  }
  fs::resize_file(file, uint64_t{1} << 40);
  EXPECT_EQ(read_checkpoint(made.path).status().code(), ErrorCode::kInvalidArgument);
  fs::remove(file);
  fs::create_symlink("/dev/zero", file);
  EXPECT_EQ(read_checkpoint(made.path).status().code(), ErrorCode::kInvalidArgument);
  fs::remove(file);
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  EXPECT_EQ(read_checkpoint(made.path).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_TRUE(list_checkpoints(path("checkpoints")).empty());
}

INSTANTIATE_TEST_SUITE_P(Once, CheckpointFolderTest, ::testing::Values(StateFormat::kF32),
                         [](const auto&) { return std::string("f32"); });

}  // namespace
}  // namespace smartinf::engine
