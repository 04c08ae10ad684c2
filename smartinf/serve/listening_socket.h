// Where a server of this program listens.
#pragma once

#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/storage/file_descriptor.h"

struct sockaddr;

namespace smartinf::serve {

/// Sockets that listen at "host:port" or "[IPv6]:port"; port 0: any that is free. One socket for
/// each address that the host has here, all at one port; they do not block. `what` of the port's
/// use is for errors. Errors: kInvalidArgument: the address; kBusy: the port is in use; as errno
/// says.
base::Result<std::vector<storage::FileDescriptor>> listening_sockets(const std::string& address,
                                                                     const std::string& what);

/// "127.0.0.1:80", "[::1]:80": of an address of IPv4 within IPv6, too, as of one of IPv4.
std::string address_text(const sockaddr* address, unsigned length);
/// Address of a socket's own side.
std::string own_address(int socket);

}  // namespace smartinf::serve
