/* paths.c: where an owner has files that must be deleted after its death.
 *
 * Why         Files outlive the process that wrote them, and their bytes stay charged on the disk
 *             axis until they are gone. Whoever cleans up must learn where they are from the
 *             segment, because the dead tell nothing else.
 * Contract    Called with the lock held. A list is set before the first file of a new directory
 *             exists, and a directory leaves it after its last file is gone; so a list names, at
 *             every instant, all directories that may have files. It is replaced as a whole.
 * Invariants  A slot that has a list keeps its managers' disk charge and is never FREE
 *             (owners.c): "the files are gone" must be said first.
 * Death       Redo: the old list or the new one.
 * Not here    Deleting, which is system calls: pool/live.py. What a path means to whoever reads
 *             it: bytes found here are input there.
 */
#include "atomics.h"
#include "internal.h"

#include <string.h>

#define PATH_WORDS (SHMC_OWNER_PATH_BYTES / sizeof(uint64_t))

_Static_assert(PATH_WORDS + 1 <= SHMC_REDO_WORDS_MAX, "a list must fit one record");

/* Absolute paths, each ended by a zero byte. */
bool shmc_paths_are_valid(const char *paths, uint64_t bytes)
{
    if (bytes > SHMC_OWNER_PATH_BYTES || (bytes != 0 && paths[bytes - 1] != 0))
        return false;
    for (uint64_t at = 0; at < bytes; at += strlen(paths + at) + 1)
        if (paths[at] != '/')
            return false;
    return true;
}

enum shmc_status shmc_paths_set(struct shmc_handle *handle, const struct shmc_request *request)
{
    struct shmc_owner *owner = &handle->owners[handle->slot];
    uint64_t words[PATH_WORDS] = {0};
    if (!shmc_paths_are_valid(request->paths, request->paths_bytes))
        return SHMC_TOO_LARGE;
    if (request->paths_bytes != 0)
        memcpy(words, request->paths, request->paths_bytes);
    shmc_redo_begin(handle, SHMC_OP_SET_PATHS);
    for (uint32_t i = 0; i < PATH_WORDS; i++) {
        uint64_t *word = (uint64_t *)(void *)owner->path + i;
        if (*word != words[i])
            shmc_redo_put(handle, word, words[i]);
    }
    if (owner->path_bytes != request->paths_bytes)
        shmc_redo_put(handle, &owner->path_bytes, request->paths_bytes);
    shmc_redo_commit(handle);
    return SHMC_OK;
}

enum shmc_status shmc_paths_forget(struct shmc_handle *handle, uint32_t slot)
{
    struct shmc_owner *owner = &handle->owners[slot];
    shmc_redo_begin(handle, SHMC_OP_FILES_GONE);
    if (owner->path_bytes != 0)
        shmc_redo_put(handle, &owner->path_bytes, 0);
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* Nothing more can be given back before the files are deleted: where they are. */
enum shmc_status shmc_paths_tell(const struct shmc_handle *handle, uint32_t slot,
                                 struct shmc_request *request)
{
    const struct shmc_owner *owner = &handle->owners[slot];
    SHMC_CHECK(shmc_paths_are_valid(owner->path, owner->path_bytes));
    request->cursor = 0;
    request->paths_bytes = owner->path_bytes;
    if (request->paths != NULL)
        memcpy(request->paths, owner->path, owner->path_bytes);
    return SHMC_LIVE_FILES;
}

/* Without the lock, where it is lost or its pool has ended. Torn while the owner changes it. */
uint64_t shmc_owner_paths(const struct shmc_handle *handle, uint32_t slot, uint64_t nonce,
                          char *paths)
{
    const struct shmc_owner *owner = &handle->owners[slot];
    uint64_t bytes = shmc_load_acquire(&owner->path_bytes);
    if (bytes > SHMC_OWNER_PATH_BYTES)
        return 0;
    memcpy(paths, owner->path, bytes);
    bool same = shmc_load_acquire(&owner->nonce) == nonce;
    return same && shmc_paths_are_valid(paths, bytes) ? bytes : 0;
}
