/* The pages of a cache of keys and values, a part of the C interface; kernel_pytorch.h says how functions fail. Who
 * owns which pages (plan/page_allocator.h): a request is a row of tokens, and full pages with equal tokens in them and
 * before them are shared. For one thread at a time. */
#ifndef KERNEL_PYTORCH_C_PAGES_H
#define KERNEL_PYTORCH_C_PAGES_H

#include "kernel_pytorch/c/kernel_pytorch.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kp_pages kp_pages;
KP_API kp_status kp_pages_create(int64_t pages, int64_t page_size, kp_pages** result);
KP_API void kp_pages_destroy(kp_pages* pages); /* NULL is fine */
/* A request that owns the pages which are there already of the front of its prompt: `shared` tokens. */
KP_API kp_status kp_pages_begin(kp_pages* pages, const int32_t* prompt, size_t count, int64_t* request,
                                int64_t* shared);
/* Pages for that many tokens more, before they are known. copy: {from, to, rows} of the rows to copy between pages
 * first; rows 0 for none. Too few pages: KP_DEVICE, and nothing has changed. */
KP_API kp_status kp_pages_reserve(kp_pages* pages, int64_t request, int64_t tokens, int32_t copy[3]);
/* Reserves and adds tokens to a request: slots[i] = page * page_size + row of token i, as append_kv takes them. */
KP_API kp_status kp_pages_extend(kp_pages* pages, int64_t request, const int32_t* tokens, size_t count, int64_t* slots,
                                 int32_t copy[3]);
KP_API kp_status kp_pages_fork(kp_pages* pages, int64_t request, int64_t* forked);
KP_API kp_status kp_pages_release(kp_pages* pages, int64_t request);
/* The row of a request in block_tables: at most `room` pages, and -1 behind them. `count` gets how many it has. */
KP_API kp_status kp_pages_table(const kp_pages* pages, int64_t request, int32_t* table, size_t room, int64_t* count);
/* counts: {pages that extend could hand out now, pages that it would take for `tokens` more tokens of the request (0
 * for request 0), tokens shared by all calls of kp_pages_begin, requests} */
KP_API kp_status kp_pages_counts(const kp_pages* pages, int64_t request, int64_t tokens, int64_t counts[4]);

#ifdef __cplusplus
}
#endif

#endif
