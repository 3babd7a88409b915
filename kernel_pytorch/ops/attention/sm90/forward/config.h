// The members of the forward's config on Hopper, for its texts and its template argument.
#pragma once

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/ops/attention/sm90/forward/tile_cuda.h"

namespace kernel_pytorch::attention {

inline constexpr auto kSm90ConfigFields =
    config_fields<Sm90Config>(config_field<&Sm90Config::head_size>(), config_field<&Sm90Config::value_size>(),
                              config_field<&Sm90Config::warpgroups>(), config_field<&Sm90Config::key_block>(),
                              config_field<&Sm90Config::stages>(), config_field<&Sm90Config::query_buffers>(),
                              config_field<&Sm90Config::query_in_registers>(), config_field<&Sm90Config::in_turns>());
constexpr ConfigFields fields_of(const Sm90Config&) {
  return kSm90ConfigFields;
}

}  // namespace kernel_pytorch::attention
