/* refusals.c: a file that is not a segment of this process, this boot and this layout is refused,
 * each by the name of the check it fails. */
#include "harness.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>

/* ---- headers made by hand ------------------------------------------------------------------- */

/* The checksum is part of the format: this is its second implementation. */
static uint64_t checksum_of(const struct shmc_header *header)
{
    uint64_t hash = 14695981039346656037ull;
    for (size_t i = 0; i < offsetof(struct shmc_header, checksum); i++)
        hash = (hash ^ ((const uint8_t *)header)[i]) * 1099511628211ull;
    return hash;
}

static struct shmc_header header_of(int fd)
{
    struct shmc_header header;
    EXPECT(pread(fd, &header, sizeof header, 0) == sizeof header);
    return header;
}

static void write_header(int fd, const struct shmc_header *header)
{
    EXPECT(pwrite(fd, header, sizeof *header, 0) == sizeof *header);
}

static void write_sealed_header(int fd, struct shmc_header *header)
{
    header->checksum = checksum_of(header);
    write_header(fd, header);
}

static struct shmc_geometry with_arena(void)
{
    struct shmc_geometry geometry = tables(ROOMY, 4, 8, 8);
    geometry.arena_bytes = 4 << 20;
    geometry.blocks_max = 100;
    geometry.block_bytes_max = 2 << 20;
    geometry.claims_max = 10;
    return geometry;
}

static int plain_segment(void)
{
    return new_segment(tables(ROOMY, 4, 8, 8));
}

static enum shmc_status open_and_close(int fd, struct shmc_refusal *refusal)
{
    struct shmc_handle *handle = NULL;
    *refusal = (struct shmc_refusal){.check = SHMC_CHECK_NONE};
    enum shmc_status status = shmc_open(fd, true, &handle, refusal);
    if (status == SHMC_OK)
        shmc_close(handle);
    return status;
}

static void expect_refusal(const char *file, int line, int fd, enum shmc_check_name check)
{
    struct shmc_refusal refusal;
    enum shmc_status status = open_and_close(fd, &refusal);
    if (status != SHMC_REFUSED || refusal.check != check)
        fail(file, line, "opening gives %s by %s, not a refusal by %s", shmc_status_name(status),
             shmc_check_name_text(refusal.check), shmc_check_name_text(check));
    if (check != SHMC_CHECK_GEOMETRY && refusal.expected == refusal.actual)
        fail(file, line, "refused by %s, although both values are %llu",
             shmc_check_name_text(check), (unsigned long long)refusal.actual);
}

#define EXPECT_REFUSAL(name, fd) expect_refusal(__FILE__, __LINE__, fd, SHMC_CHECK_##name)

/* ---- the file itself ------------------------------------------------------------------------ */

TEST(a_segment_opens)
{
    struct shmc_refusal refusal;
    struct shmc_geometry geometry = with_arena();
    MUST(open_and_close(plain_segment(), &refusal));
    MUST(open_and_close(new_segment(geometry), &refusal));
    geometry.mode = 0660;
    MUST(open_and_close(new_segment(geometry), &refusal));
    struct shmc_header header = header_of(new_segment(geometry));
    EXPECT_EQ(checksum_of(&header), header.checksum);
}

TEST(what_is_no_file_is_refused)
{
    int ends[2];
    EXPECT(pipe(ends) == 0);
    EXPECT_REFUSAL(FILE_TYPE, ends[0]);
    EXPECT_REFUSAL(FILE_TYPE, open("/", O_RDONLY | O_CLOEXEC));
    EXPECT_REFUSAL(FILE_TYPE, open("/dev/null", O_RDWR | O_CLOEXEC));
}

TEST(a_wrong_size_is_refused)
{
    EXPECT_REFUSAL(SIZE, new_file(0, 0600));
    EXPECT_REFUSAL(SIZE, new_file(SHMC_PAGE_BYTES - 1, 0600));
    int fd = plain_segment();
    off_t size = (off_t)header_of(fd).total_bytes;
    const off_t wrong[] = {size - 1, size + 1, size - SHMC_PAGE_BYTES, size * 2, SHMC_PAGE_BYTES};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        EXPECT(ftruncate(fd, wrong[i]) == 0);
        EXPECT_REFUSAL(SIZE, fd);
    }
}

TEST(a_wrong_mode_is_refused)
{
    int fd = plain_segment();
    const mode_t wrong[] = {0400, 0640, 0660, 0604, 0601, 0666, 0700, 0777};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        EXPECT(fchmod(fd, wrong[i]) == 0);
        EXPECT_REFUSAL(MODE, fd);
    }
}

static void become_nobody(void)
{
    EXPECT(seteuid(65534) == 0);
    EXPECT(prctl(PR_SET_DUMPABLE, 1) == 0);
}

static void expect_foreign_owner(void *fd)
{
    become_nobody();
    EXPECT_REFUSAL(OWNER_UID, *(int *)fd);
}

static void expect_group_member(void *fd)
{
    struct shmc_refusal refusal;
    become_nobody();
    MUST(open_and_close(*(int *)fd, &refusal));
}

TEST(a_foreign_owner_is_refused)
{
    int fd = plain_segment();
    if (geteuid() == 0) {
        in_child(expect_foreign_owner, &fd);
        struct shmc_geometry geometry = with_arena();
        geometry.mode = 0660;
        int shared = new_segment(geometry);
        in_child(expect_group_member, &shared); /* for a group, another user is no stranger */
    }
    struct shmc_header header = header_of(fd);
    header.owner_uid++; /* the file changed hands after it was made */
    write_sealed_header(fd, &header);
    EXPECT_REFUSAL(OWNER_UID, fd);
}

TEST(a_closed_descriptor_is_an_error)
{
    struct shmc_refusal refusal;
    int fd = plain_segment();
    close(fd);
    EXPECT_STATUS(SYSTEM, open_and_close(fd, &refusal));
    EXPECT_EQ(EBADF, errno);
}

TEST(a_refused_file_leaves_no_descriptor)
{
    struct shmc_refusal refusal;
    int fd = new_file(SHMC_PAGE_BYTES, 0600);
    int next = dup(fd);
    close(next);
    EXPECT_STATUS(REFUSED, open_and_close(fd, &refusal));
    MUST(open_and_close(plain_segment(), &refusal));
    EXPECT_EQ(next + 1, dup(fd)); /* next itself is the plain segment */
}

/* ---- the header ----------------------------------------------------------------------------- */

TEST(another_format_is_refused)
{
    EXPECT_REFUSAL(MAGIC, new_file(SHMC_PAGE_BYTES, 0600)); /* all zero */
    int fd = plain_segment();
    const struct shmc_header good = header_of(fd);
    struct shmc_header header = good;
    header.magic++;
    write_sealed_header(fd, &header);
    EXPECT_REFUSAL(MAGIC, fd);
    header = good;
    header.version++;
    write_header(fd, &header); /* a later version may seal in another way */
    EXPECT_REFUSAL(VERSION, fd);
    for (int byte = 0; byte < 4; byte++) {
        header = good;
        header.abi_tag += 1u << (8 * byte); /* word size, mutex size, byte order, libc */
        write_header(fd, &header);
        EXPECT_REFUSAL(ABI, fd);
    }
}

TEST(another_host_is_refused)
{
    int fd = plain_segment();
    const struct shmc_header good = header_of(fd);
    struct shmc_header header = good;
    header.boot_id[0]++;
    write_sealed_header(fd, &header);
    EXPECT_REFUSAL(BOOT_ID, fd);
    header = good;
    header.pid_namespace++;
    write_sealed_header(fd, &header);
    EXPECT_REFUSAL(PID_NAMESPACE, fd);
    header = good;
    header.time_namespace++;
    write_sealed_header(fd, &header);
    EXPECT_REFUSAL(TIME_NAMESPACE, fd);
}

TEST(a_copy_is_refused_and_a_new_name_is_not)
{
    int fd = plain_segment();
    struct shmc_header header = header_of(fd);
    struct shmc_refusal refusal;
    int copy = new_file(header.total_bytes, 0600);
    uint8_t *bytes = malloc(header.total_bytes);
    EXPECT(bytes != NULL);
    EXPECT(pread(fd, bytes, header.total_bytes, 0) == (ssize_t)header.total_bytes);
    EXPECT(pwrite(copy, bytes, header.total_bytes, 0) == (ssize_t)header.total_bytes);
    free(bytes);
    EXPECT_REFUSAL(INODE, copy);
    MUST(open_and_close(fd, &refusal));
}

TEST(another_boot_is_refused_by_either_word)
{
    int fd = plain_segment();
    struct shmc_header header = header_of(fd);
    struct shmc_refusal refusal;
    header.boot_id[1]++;
    write_sealed_header(fd, &header);
    EXPECT_STATUS(REFUSED, open_and_close(fd, &refusal));
    EXPECT_EQ(SHMC_CHECK_BOOT_ID, refusal.check);
}

TEST(every_flipped_bit_of_the_header_is_noticed)
{
    int fd = plain_segment();
    const struct shmc_header good = header_of(fd);
    for (size_t bit = 0; bit < sizeof good * 8; bit++) {
        struct shmc_header header = good;
        struct shmc_refusal refusal;
        ((uint8_t *)&header)[bit / 8] ^= (uint8_t)(1 << (bit % 8));
        write_header(fd, &header);
        EXPECT_STATUS(REFUSED, open_and_close(fd, &refusal));
        EXPECT(refusal.check >= SHMC_CHECK_MAGIC && refusal.check <= SHMC_CHECK_CHECKSUM);
    }
}

/* ---- geometry ------------------------------------------------------------------------------- */

/* One bound broken in a geometry that is otherwise right. */
#define BROKEN(field, bad)                                                                         \
    {offsetof(struct shmc_geometry, field), sizeof((struct shmc_geometry *)0)->field, (bad)}

static const struct broken {
    size_t offset;
    size_t bytes;
    uint64_t value;
} broken[] = {
    BROKEN(limits[SHMC_DEVICE], 0),
    BROKEN(limits[SHMC_TRANSFER], 0),
    BROKEN(owners_max, 0),
    BROKEN(owners_max, SHMC_OWNERS_LIMIT + 1),
    BROKEN(owners_max, UINT32_MAX),
    BROKEN(managers_max, 0),
    BROKEN(managers_max, SHMC_MANAGERS_LIMIT + 1),
    BROKEN(reservations_max, 0),
    BROKEN(reservations_max, SHMC_RESERVATIONS_LIMIT + 1),
    BROKEN(blocks_max, 0),
    BROKEN(blocks_max, SHMC_BLOCKS_LIMIT + 1),
    BROKEN(arena_bytes, 0),
    BROKEN(arena_bytes, SHMC_ARENA_BYTES_LIMIT + 1),
    BROKEN(arena_bytes, UINT64_MAX),
    BROKEN(arena_bytes, (4 << 20) + 1),
    BROKEN(block_bytes_max, 0),
    BROKEN(block_bytes_max, (4 << 20) + 1),
    BROKEN(claims_max, SHMC_CLAIMS_LIMIT + 1),
    BROKEN(free_low_bytes, 1),
    BROKEN(free_high_bytes, 4 << 20),
    BROKEN(eviction_policy, SHMC_POLICIES),
    BROKEN(flags, SHMC_FLAGS + 1),
    BROKEN(reserved, 1),
    BROKEN(mode, 0),
    BROKEN(mode, 0400),
    BROKEN(mode, 0666),
    BROKEN(mode, 0700),
    BROKEN(mode, 0100600),
};

TEST(an_impossible_geometry_is_refused)
{
    struct shmc_refusal refusal;
    int fd = new_segment(with_arena());
    const struct shmc_header good = header_of(fd);
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        struct shmc_header header = good;
        memcpy((uint8_t *)&header.geometry + broken[i].offset, &broken[i].value, broken[i].bytes);
        EXPECT_EQ(0, shmc_segment_bytes(&header.geometry));
        EXPECT_STATUS(REFUSED, shmc_format(fd, &header.geometry, &refusal));
        EXPECT_EQ(SHMC_CHECK_GEOMETRY, refusal.check);
        write_sealed_header(fd, &header);
        EXPECT_REFUSAL(GEOMETRY, fd);
    }
}

TEST(the_largest_geometry_is_possible)
{
    struct shmc_geometry geometry =
        tables(U(UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX), SHMC_OWNERS_LIMIT,
               SHMC_MANAGERS_LIMIT, SHMC_RESERVATIONS_LIMIT);
    geometry.arena_bytes = SHMC_ARENA_BYTES_LIMIT;
    geometry.blocks_max = SHMC_BLOCKS_LIMIT;
    geometry.block_bytes_max = SHMC_BLOCK_BYTES_LIMIT;
    geometry.claims_max = SHMC_CLAIMS_LIMIT;
    EXPECT(shmc_segment_bytes(&geometry) > SHMC_ARENA_BYTES_LIMIT);
    EXPECT(shmc_segment_bytes(&geometry) < 2 * SHMC_ARENA_BYTES_LIMIT);
}

static void expect_sound_layout(const struct shmc_header *header)
{
    const struct shmc_geometry *geometry = &header->geometry;
    uint64_t end = 0;
    for (int region = 0; region < SHMC_REGIONS; region++) {
        EXPECT(header->region_offset[region] >= end);
        EXPECT_EQ(0, header->region_offset[region] % 64);
        end = header->region_offset[region] + header->region_bytes[region];
    }
    EXPECT(end <= header->total_bytes && header->total_bytes % SHMC_PAGE_BYTES == 0);
    EXPECT_EQ(0, header->region_offset[SHMC_REGION_ARENA] %
                     (geometry->arena_bytes != 0 ? SHMC_ARENA_ALIGN_BYTES : SHMC_PAGE_BYTES));
    EXPECT_EQ(geometry->arena_bytes, header->region_bytes[SHMC_REGION_ARENA]);
    EXPECT(header->manager_buckets >= geometry->managers_max);
    EXPECT_EQ(0, header->manager_buckets & (header->manager_buckets - 1));
    EXPECT(header->index_buckets * 8ull >= geometry->blocks_max * 2);
    EXPECT(header->region_bytes[SHMC_REGION_PINS] * 8 >=
           geometry->blocks_max * geometry->owners_max);
    uint64_t slabs = header->slabs_max * header->slab_bytes;
    EXPECT(slabs >= geometry->arena_bytes && slabs - geometry->arena_bytes <= header->slab_bytes);
    EXPECT(header->slab_bytes >= geometry->block_bytes_max);
    EXPECT_EQ(0, header->ring_entries & (header->ring_entries - 1));
}

/* Regions never overlap, whatever the sizes; small ones, so that many can be formatted. */
TEST(any_geometry_has_a_sound_layout)
{
    for (uint64_t round = 0; round < rounds(200); round++) {
        struct shmc_geometry geometry =
            tables(ROOMY, 1 + (uint32_t)random_below(20), 1 + (uint32_t)random_below(200),
                   1 + (uint32_t)random_below(200));
        if (random_below(2) == 0) {
            geometry.arena_bytes = 64 * (1 + random_below(160 << 10));
            geometry.blocks_max = 1 + random_below(2000);
            geometry.block_bytes_max = 1 + random_below(geometry.arena_bytes);
            geometry.claims_max = (uint32_t)random_below(100);
            geometry.eviction_policy = (uint32_t)random_below(SHMC_POLICIES);
        }
        int fd = new_segment(geometry);
        struct shmc_header header = header_of(fd);
        expect_sound_layout(&header);
        close(fd);
    }
}

/* The words that a creator chooses freely; all others follow from the rest or from the host. */
static bool differ_only_in_choices(struct shmc_header one, struct shmc_header two)
{
    two.pool_id = one.pool_id;
    two.created_ns = one.created_ns;
    two.geometry.eviction_policy = one.geometry.eviction_policy;
    two.geometry.flags = one.geometry.flags;
    two.geometry.block_bytes_max = one.geometry.block_bytes_max;
    two.geometry.free_low_bytes = one.geometry.free_low_bytes;
    two.geometry.free_high_bytes = one.geometry.free_high_bytes;
    memcpy(two.geometry.limits, one.geometry.limits, sizeof two.geometry.limits);
    two.checksum = one.checksum;
    return memcmp(&one, &two, sizeof one) == 0;
}

static uint64_t interesting_word(uint64_t word)
{
    switch (random_below(5)) {
    case 0:
        return random_u64();
    case 1:
        return word ^ (1ull << random_below(64));
    case 2:
        return word + 1;
    case 3:
        return 0;
    default:
        return UINT64_MAX >> random_below(64);
    }
}

/* A right checksum proves only that somebody can compute it. */
TEST(any_sealed_header_is_refused_or_harmless)
{
    int fd = new_segment(with_arena());
    const struct shmc_header good = header_of(fd);
    for (uint64_t round = 0; round < rounds(5000); round++) {
        struct shmc_header header = good;
        struct shmc_refusal refusal;
        for (uint64_t changes = 1 + random_below(3); changes > 0; changes--) {
            uint64_t *word = (uint64_t *)&header + random_below(sizeof header / 8);
            *word = interesting_word(*word);
        }
        write_sealed_header(fd, &header);
        if (open_and_close(fd, &refusal) == SHMC_OK)
            EXPECT(differ_only_in_choices(good, header));
        else
            EXPECT(refusal.check != SHMC_CHECK_NONE && refusal.check != SHMC_CHECK_CHECKSUM);
    }
}
