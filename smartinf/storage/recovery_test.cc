// The table of docs/format.md, line by line: which step several devices can be brought to.
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/storage/store.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::StepNumber;

StoreState device(uint32_t index, StepNumber committed, StepNumber prepared, uint32_t count = 2) {
  StoreState state;
  state.run.bytes = {7};
  state.device_index = index;
  state.device_count = count;
  state.committed_step = committed;
  state.prepared_step = prepared;
  state.initialized = true;
  state.complete = true;
  return state;
}

/// Its first step is prepared and not committed.
StoreState prepared_only(uint32_t index, StepNumber step) {
  StoreState state = device(index, step, step);
  state.complete = false;
  state.copied_step = step;
  return state;
}

StoreState unfinished(uint32_t index) {
  StoreState state = device(index, 0, 0);
  state.initialized = state.complete = false;
  return state;
}

base::Result<StepNumber> decide(const std::vector<StoreState>& devices) {
  return recovery_step(devices);
}

TEST(Recovery, EveryPointOfACrash) {
  // During step 8's writes, before anyone has prepared it.
  EXPECT_EQ(*decide({device(0, 7, 7), device(1, 7, 7)}), 7u);
  // Some have prepared it: those go back.
  EXPECT_EQ(*decide({device(0, 7, 8), device(1, 7, 7)}), 7u);
  EXPECT_EQ(*decide({device(0, 7, 7), device(1, 7, 8)}), 7u);
  // All have: forward.
  EXPECT_EQ(*decide({device(0, 7, 8), device(1, 7, 8)}), 8u);
  // Some, then all superblocks say so.
  EXPECT_EQ(*decide({device(0, 8, 8), device(1, 7, 8)}), 8u);
  EXPECT_EQ(*decide({device(0, 8, 8), device(1, 8, 8)}), 8u);
  // One lost its commit with the power while the other had prepared the next step.
  EXPECT_EQ(*decide({device(0, 8, 9), device(1, 7, 8)}), 8u);
  // Recovery itself was cut after the first device.
  EXPECT_EQ(*decide({device(0, 8, 8), device(1, 8, 9)}), 8u);
}

TEST(Recovery, OneDevice) {
  EXPECT_EQ(*decide({device(0, 3, 3, 1)}), 3u);
  EXPECT_EQ(*decide({device(0, 3, 4, 1)}), 4u);
}

TEST(Recovery, Creation) {
  EXPECT_EQ(decide({unfinished(0), unfinished(1)}).status().code(), ErrorCode::kFailedPrecondition);
  EXPECT_EQ(decide({device(0, 0, 0), unfinished(1)}).status().code(),
            ErrorCode::kFailedPrecondition);
  EXPECT_EQ(*decide({device(0, 0, 0), device(1, 0, 0)}), 0u);
  EXPECT_EQ(decide({device(0, 5, 5), unfinished(1)}).status().code(), ErrorCode::kMismatch);
}

// A copy of step 5 (restore, reshard): prepared on all devices, then committed on all.
TEST(Recovery, CopyOfALaterStep) {
  const auto cut = decide({prepared_only(0, 5), unfinished(1)}).status();
  EXPECT_EQ(cut.code(), ErrorCode::kFailedPrecondition);
  EXPECT_THAT(cut.to_string(), ::testing::HasSubstr("a copy of step 5"));
  EXPECT_THAT(cut.to_string(), ::testing::HasSubstr("smartinf restore"));
  EXPECT_EQ(*decide({prepared_only(0, 5), prepared_only(1, 5)}), 5u);
  EXPECT_EQ(*decide({device(0, 5, 5), prepared_only(1, 5)}), 5u);
}

TEST(Recovery, WhatNoCrashExplains) {
  EXPECT_EQ(decide({device(0, 8, 8), device(1, 7, 7)}).status().code(), ErrorCode::kMismatch);
  EXPECT_EQ(decide({device(0, 9, 9), device(1, 7, 8)}).status().code(), ErrorCode::kMismatch);
}

TEST(Recovery, WrongSetOfDevices) {
  EXPECT_EQ(decide({}).status().code(), ErrorCode::kNotFound);
  const auto missing = decide({device(1, 7, 7)});
  EXPECT_EQ(missing.status().code(), ErrorCode::kNotFound);
  EXPECT_THAT(missing.status().what(), ::testing::HasSubstr("device 0 of the 2"));
  EXPECT_EQ(decide({device(0, 7, 7), device(0, 7, 7)}).status().code(), ErrorCode::kMismatch);
  StoreState other = device(1, 7, 7);
  other.run.bytes = {8};
  EXPECT_EQ(decide({device(0, 7, 7), other}).status().code(), ErrorCode::kMismatch);
}

}  // namespace
}  // namespace smartinf::storage
