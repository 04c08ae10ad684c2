// Frames as gRPC's byte buffers: payloads are neither copied into them nor out of them.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <grpcpp/support/byte_buffer.h>

#include "smartinf/serve/frame.h"

namespace smartinf::serve::wire {

/// The method through which client and server say everything: there is one, and a stream of it.
inline constexpr char kMethod[] = "/smartinf.remote.v1.Device/Talk";

/// Bytes of a file with a key or certificates, at most.
inline constexpr uint64_t kPemBytesMax = uint64_t{1} << 20;

inline grpc::ByteBuffer to_buffer(const OutFrame& frame) {
  const grpc::Slice head(frame.head.data(), frame.head.size());
  if (frame.payload.bytes.empty()) return grpc::ByteBuffer(&head, 1);
  // The slice holds the owner until gRPC needs it no more, which may be after the stream's end.
  auto* owner = new std::shared_ptr<const void>(frame.payload.owner);
  const grpc::Slice slices[] = {
      head, grpc::Slice(
                const_cast<std::byte*>(frame.payload.bytes.data()), frame.payload.bytes.size(),
                [](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); }, owner)};
  return grpc::ByteBuffer(slices, 2);
}

inline base::Result<InFrame> from_buffer(const grpc::ByteBuffer& buffer) {
  auto slices = std::make_shared<std::vector<grpc::Slice>>();
  if (!buffer.Dump(slices.get()).ok()) {
    return base::Status(base::ErrorCode::kCorrupt, "a message cannot be read");
  }
  std::vector<std::span<const std::byte>> pieces;
  for (const grpc::Slice& slice : *slices) {
    pieces.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
  }
  return InFrame::split(std::move(pieces), std::move(slices));
}

}  // namespace smartinf::serve::wire
