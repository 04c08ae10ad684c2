#include <gtest/gtest.h>

#include "smartinf/serve/protocol_fields.h"
#include "smartinf/serve/stream.h"

namespace smartinf::serve::wire {
namespace {

InFrame frame_of(const std::vector<std::byte>& bytes) {
  auto held = std::make_shared<std::vector<std::byte>>(bytes);
  const std::span<const std::byte> all(*held);
  // In pieces, as a transport has it.
  std::vector<std::span<const std::byte>> pieces;
  for (size_t at = 0; at < all.size(); at += 7) {
    pieces.push_back(all.subspan(at, std::min<size_t>(7, all.size() - at)));
  }
  auto frame = InFrame::split(std::move(pieces), std::move(held));
  EXPECT_TRUE(frame.ok()) << frame.status().to_string();
  return std::move(*frame);
}

TEST(RemoteWire, MessagesComeAsTheyWere) {
  csd::Update update;
  update.scalars.resize(2);
  update.scalars[1].lr = 0.25f;
  float weights = 0;
  base::Bf16 samples{};
  update.updates = {{base::SubgroupId{7}, &weights, nullptr},
                    {base::SubgroupId{9}, nullptr, &samples}};
  update.mode = plan::UpdateMode::kRest;
  const Up sent{42, CommandFrame{0, 0, csd::Message(update)}};
  const auto came = decode<Up>(frame_of(encode(sent)));
  ASSERT_TRUE(came.ok()) << came.status().to_string();
  EXPECT_EQ(came->number, 42u);
  const auto& same =
      std::get<csd::Update>(std::get<csd::Message>(std::get<CommandFrame>(came->body).body));
  EXPECT_EQ(same.scalars, update.scalars);
  ASSERT_EQ(same.updates.size(), 2u);
  EXPECT_EQ(same.updates[1].subgroup, base::SubgroupId{9});
  // Pointers say that there is memory, and not where.
  EXPECT_NE(same.updates[0].weights_out, nullptr);
  EXPECT_NE(same.updates[0].weights_out, &weights);
  EXPECT_EQ(same.updates[0].samples_out, nullptr);
  EXPECT_EQ(same.updates[1].weights_out, nullptr);
  EXPECT_NE(same.updates[1].samples_out, nullptr);
  EXPECT_EQ(same.mode, plan::UpdateMode::kRest);

  Attached attached;
  attached.outcome = base::Status(base::ErrorCode::kBusy, "in use", "Wait.", {"/a", 5, {}, 16});
  attached.layout.planes = {base::PlaneKind::kMaster, base::PlaneKind::kResidual};
  attached.layout.subgroups.resize(3);
  const auto back = decode<Attached>(frame_of(encode(attached)));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->outcome.to_string(), attached.outcome.to_string());
  EXPECT_EQ(back->layout.planes, attached.layout.planes);
  EXPECT_EQ(back->layout.subgroups.size(), 3u);
}

TEST(RemoteWire, AHeadThatWasCutOrChangedIsNone) {
  const std::vector<std::byte> whole =
      encode(Up{3, CommandFrame{0, 0, csd::Message(csd::Prepare{5, "meta"})}});
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::vector<std::byte> cut(whole.begin(), whole.begin() + static_cast<long>(size));
    EXPECT_FALSE(InFrame::split({cut}, nullptr).ok()) << size;
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    std::vector<std::byte> changed = whole;
    changed[i] ^= std::byte{0x10};
    const auto frame = InFrame::split({changed}, nullptr);
    EXPECT_FALSE(frame.ok() && frame->payload_bytes() == 0) << i;
  }
}

/// A head of these bytes, with the right checksum: from a client that means harm.
base::Result<Up> decode_raw(std::vector<std::byte> head) {
  return decode<Up>(frame_of(seal_head(std::move(head))));
}

TEST(RemoteWire, LengthsAreNotBelieved) {
  base::Encoder writer;
  writer(uint64_t{1}, uint8_t{0});               // a command
  writer(uint64_t{0}, uint64_t{0}, uint8_t{0});  // with a message
  writer(uint8_t{1});                            // prefetch
  writer(~uint32_t{0});                          // of 2^32 - 1 subgroups
  EXPECT_FALSE(decode_raw(writer.take()).ok());
  base::Encoder alternative;
  alternative(uint64_t{1}, uint8_t{200});
  EXPECT_FALSE(decode_raw(alternative.take()).ok());
  std::vector<std::byte> longer = [&] {
    base::Encoder ack;
    ack(Up{0, AckFrame{4}});
    return ack.take();
  }();
  EXPECT_TRUE(decode_raw(longer).ok());
  longer.push_back(std::byte{0});
  EXPECT_FALSE(decode_raw(longer).ok());
}

TEST(RemoteWire, WhatAnotherVersionSaysBehindItsNumberIsNotLookedAt) {
  for (const uint32_t version : {kProtocolVersion + 1, kProtocolVersion - 1}) {
    base::Encoder writer;
    writer(kProtocolMagic, version, std::string("what comes after"));
    const InFrame frame = frame_of(seal_head(writer.take()));
    const auto hello = decode<Hello>(frame);
    ASSERT_TRUE(hello.ok());
    EXPECT_EQ(hello->version, version);
    const auto welcome = decode<Welcome>(frame);
    ASSERT_TRUE(welcome.ok());
    EXPECT_EQ(welcome->version, version);
  }
}

TEST(RemoteWire, EndpointsAreParsed) {
  const auto endpoint = [](const std::string& url) { return Endpoint::parse(url); };
  const auto right = endpoint("grpc://store.lan:7443/fast0");
  ASSERT_TRUE(right.ok());
  EXPECT_EQ(right->address, "store.lan:7443");
  EXPECT_EQ(right->device, "fast0");
  for (const char* wrong : {"/mnt/fast0", "grpc://store.lan/fast0", "grpc://store.lan:7443",
                            "grpc://store.lan:7443/", "grpc://store.lan:0/x", "grpc://:1/x",
                            "grpc://store.lan:70000/x", "grpc://store.lan:7443/a/b"}) {
    EXPECT_FALSE(endpoint(wrong).ok()) << wrong;
  }
}

}  // namespace
}  // namespace smartinf::serve::wire
