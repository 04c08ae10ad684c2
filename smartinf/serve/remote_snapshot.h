// Remote states as a whole: Snapshot and NewState over a conversation.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "smartinf/csd/snapshot.h"
#include "smartinf/serve/conversation.h"

namespace smartinf::serve::wire {

/// session: of the device, where this process has it open.
base::Result<std::unique_ptr<csd::Snapshot>> open_remote_snapshot(const std::string& name,
                                                                  const Endpoint& endpoint,
                                                                  const RemoteOptions& options,
                                                                  storage::ReaderLock lock,
                                                                  std::optional<SessionId> session);

base::Result<std::unique_ptr<csd::NewState>> create_remote_state(
    const Endpoint& endpoint, const RemoteOptions& options, const storage::StoreLayout& layout,
    const csd::NewStateOptions& state_options);

}  // namespace smartinf::serve::wire
