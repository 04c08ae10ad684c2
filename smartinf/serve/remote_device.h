// A device that a server has open for this client: the Device interface over a session.
#pragma once

#include <memory>
#include <string>

#include "smartinf/csd/device.h"
#include "smartinf/csd/device_source.h"
#include "smartinf/serve/client_session.h"

namespace smartinf::serve::wire {

/// name: as in messages. share: what it was opened with.
std::unique_ptr<csd::Device> make_remote_device(std::string name, const Endpoint& endpoint,
                                                const RemoteOptions& options,
                                                std::unique_ptr<ClientSession> session,
                                                Attached attached, const csd::DeviceShare& share);

}  // namespace smartinf::serve::wire
