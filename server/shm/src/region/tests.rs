use super::*;

#[test]
fn areas_are_aligned_and_do_not_overlap() {
    let mut layout = Layout::new();
    let a = layout.line(1).expect("small");
    let b = layout.line(65).expect("small");
    let c = layout.page(10).expect("small");
    let d = layout.line(8).expect("small");
    assert_eq!((a, b, c, d), (0, 64, 4096, 4160));
    assert_eq!(layout.len(), 8192);
    assert!(matches!(layout.page(usize::MAX), Err(RegionError::TooLarge { .. })));
    assert!(matches!(layout.page(isize::MAX as usize), Err(RegionError::TooLarge { .. })));
}

#[test]
fn two_mappings_share_memory_and_views_are_checked() {
    let region = SharedRegion::create("test", 8192).expect("memfd");
    let fd = rustix::io::fcntl_dupfd_cloexec(&*region, 0).expect("dup");
    let other = SharedRegion::from_fd(fd, 8192).expect("map again");
    let ours = region.slice::<u64>(64, 2).expect("in bounds");
    let theirs = other.slice::<u64>(64, 2).expect("in bounds");
    assert_ne!(ours.as_ptr(), theirs.as_ptr());
    ours.atomics()[1].store(7, Ordering::Relaxed);
    drop((ours, region));
    assert_eq!(theirs.atomics()[1].load(Ordering::Relaxed), 7);
    other.populate(1, 5000).expect("memory");
    assert_eq!(theirs.atomics()[1].load(Ordering::Relaxed), 7, "populating keeps contents");

    assert!(other.slice::<u8>(8192, 0).is_ok());
    for (offset, len) in [(8192, 1), (0, 8193), (usize::MAX, 2), (8, usize::MAX)] {
        assert!(matches!(other.slice::<u8>(offset, len), Err(RegionError::OutOfBounds { .. })), "{offset}");
    }
    assert!(matches!(other.slice::<u64>(4, 1), Err(RegionError::Misaligned { offset: 4, align: 8 })));
    assert!(matches!(other.populate(8000, 193), Err(RegionError::OutOfBounds { .. })));
}

#[test]
fn length_is_sealed_and_checked() {
    let region = SharedRegion::create("test", 4096).expect("memfd");
    assert!(rustix::fs::ftruncate(&*region, 0).is_err());
    assert!(rustix::fs::ftruncate(&*region, 8192).is_err());
    let dup = || rustix::io::fcntl_dupfd_cloexec(&*region, 0).expect("dup");
    assert!(rustix::io::fcntl_getfd(&*region).expect("flags").contains(rustix::io::FdFlags::CLOEXEC));
    let wrong = SharedRegion::from_fd(dup(), 8192);
    assert!(matches!(wrong, Err(RegionError::Length { expected: 8192, found: 4096 })));
    let bare = rustix::fs::memfd_create("bare", MemfdFlags::ALLOW_SEALING).expect("memfd");
    rustix::fs::ftruncate(&bare, 4096).expect("size");
    assert!(matches!(SharedRegion::from_fd(bare, 4096), Err(RegionError::Unsealed)));
    assert!(matches!(SharedRegion::create("none", 0), Err(RegionError::Empty { .. })));
}

#[test]
fn freed_pages_are_zero_for_every_process_and_come_back_when_they_are_touched() {
    // The last page is not whole.
    let region = SharedRegion::create("test", 5 * PAGE + 100).expect("memfd");
    let other = SharedRegion::from_fd(region.try_clone_fd().expect("dup"), region.len()).expect("map again");
    let blocks = || rustix::fs::fstat(&*other).expect("fstat").st_blocks;
    region.populate(0, region.len()).expect("memory");
    assert_eq!(blocks() as usize * 512, 6 * PAGE);
    let ours = region.slice::<u32>(0, region.len() / 4).expect("in bounds");
    ours.atomics().iter().for_each(|word| word.store(7, Ordering::Relaxed));
    region.free_pages().expect("the kernel frees pages");
    assert_eq!(blocks(), 0);
    drop((ours, region));
    let theirs = other.slice::<u32>(0, other.len() / 4).expect("in bounds");
    theirs.atomics()[PAGE / 4].store(9, Ordering::Relaxed);
    assert_eq!(blocks() as usize * 512, PAGE, "the page that was touched");
    let left = theirs.atomics().iter().filter(|word| word.load(Ordering::Relaxed) != 0).count();
    assert_eq!(left, 1, "everything else is zero");
}

#[test]
fn populating_leaves_no_page_out() {
    let bytes = 2 * POPULATED_AT_ONCE + 3 * PAGE;
    let region = SharedRegion::create("test", bytes).expect("memfd");
    let blocks = || rustix::fs::fstat(&*region).expect("fstat").st_blocks as usize * 512;
    region.populate(PAGE + 1, POPULATED_AT_ONCE).expect("memory");
    assert_eq!(blocks(), POPULATED_AT_ONCE + PAGE);
    region.populate(0, bytes).expect("memory");
    assert_eq!(blocks(), bytes);
}
