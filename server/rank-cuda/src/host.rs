//! Properties of ranks on GPUs that need no access to a GPU. The router uses them, in every build.

use std::path::Path;

use expertd_kernels::layout::{Shape, WindowLayout};
use expertd_kernels::params::MAX_EXPERTS;

use crate::format::Stored;
use crate::gpus::is_shared;
use expertd_ipc::GroupShape;
use expertd_model::{ModelSpec, MoeLayer};
use expertd_types::{Fp8Products, GpuPath};

/// Whether this build can run ranks on GPUs.
pub const BUILT: bool = cfg!(feature = "cuda");

/// Environment variable that makes GPU ranks launch steps kernel by kernel instead of replaying graphs.
pub const EAGER: &str = "EXPERTD_CUDA_EAGER";

/// Environment variable that makes GPU ranks wait for each other before each step's work, so that the step's times include
/// no wait for a rank whose rows arrived later.
pub const ALIGNED: &str = "EXPERTD_CUDA_ALIGNED";

/// Environment variable of the setting `gpu_path`, through which ranks and loaders get it, too.
pub const GPU_PATH: &str = "EXPERTD_GPU_PATH";

/// Error message for a build without GPU ranks, with the way out.
pub const BUILD_HINT: &str = "this build has no GPU ranks; build with `cargo build --release --features cuda` \
                              (scripts/fetch-cuda.sh gets the compiler), or use --device cpu";

/// The kernels' row length is a multiple of this number of elements; shorter rows are padded.
const ROW_UNIT: usize = 64;

/// Tokens of the portable kernels' tiles, and the most tiles of a launch (`kernels/src/portable/grouped_tiles.cuh`).
const PORTABLE_TILE_ROWS: usize = 128;
const PORTABLE_MOST_TILES: usize = 65535;

/// Environment variables that ranks on GPUs need: no NVLink multicast, only those kernels loaded that ranks ask for (they ask for all
/// of their path before any wait on the device), and NCCL's permission to share a GPU if ranks do. `gpus` has each rank's GPU.
#[must_use]
pub fn environment(gpus: &[u32]) -> Vec<(String, String)> {
    let mut all = vec![("NCCL_NVLS_ENABLE", "0"), ("CUDA_MODULE_LOADING", "LAZY")];
    if is_shared(gpus) {
        all.push(("NCCL_MULTI_RANK_GPU_ENABLE", "1"));
    }
    if std::env::var_os(ORDER).is_none() {
        all.push((ORDER, BY_ADDRESS));
    }
    all.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Environment variables that tell ranks which kernels to run, and where the driver keeps those that it compiles.
#[must_use]
pub fn path_environment(path: GpuPath, cache: Option<&Path>) -> Vec<(String, String)> {
    let cache = cache.map(|folder| ("CUDA_CACHE_PATH".to_owned(), folder.display().to_string()));
    std::iter::once((GPU_PATH.to_owned(), path.to_string())).chain(cache).collect()
}

/// Variable that decides how CUDA numbers GPUs: by PCI address unless the user sets it, so that the router can compute the
/// NUMA node of each rank.
const ORDER: &str = "CUDA_DEVICE_ORDER";
const BY_ADDRESS: &str = "PCI_BUS_ID";

/// `[ranks]`: NUMA node of each rank's GPU, where the machine reports it. Reads only the driver's list and sysfs. `gpus` has each
/// rank's GPU.
#[must_use]
pub fn numa_nodes(gpus: &[u32]) -> Vec<Option<usize>> {
    let by_address = std::env::var(ORDER).map_or(true, |order| order == BY_ADDRESS);
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let driver = Path::new("/proc/driver/nvidia/gpus");
    let nodes =
        if by_address { nodes_by_address(driver, Path::new("/sys/bus/pci/devices")) } else { Vec::new() };
    let node = |&gpu: &u32| nodes.get(ordinal(gpu as usize, visible.as_deref())?).copied().flatten();
    gpus.iter().map(node).collect()
}

/// Index among all GPUs of the machine of the GPU with this index in `visible`; `None` if that lists them by anything but index.
fn ordinal(gpu: usize, visible: Option<&str>) -> Option<usize> {
    match visible {
        Some(list) => list.split(',').nth(gpu)?.trim().parse().ok(),
        None => Some(gpu),
    }
}

/// NUMA nodes of the driver's GPUs, in the order of their PCI addresses.
fn nodes_by_address(driver: &Path, devices: &Path) -> Vec<Option<usize>> {
    let entries = std::fs::read_dir(driver).into_iter().flatten().flatten();
    let mut addresses: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    addresses.sort();
    let node = |address: &String| {
        let text = std::fs::read_to_string(devices.join(address.to_lowercase()).join("numa_node")).ok()?;
        // -1 means unknown and fails to parse.
        text.trim().parse().ok()
    };
    addresses.iter().map(node).collect()
}

/// Number of GPUs that ranks may use: those of the machine, as far as `CUDA_VISIBLE_DEVICES` allows. Reads only device
/// files, so that the router stays free of CUDA.
#[must_use]
pub fn present() -> u32 {
    let files = std::fs::read_dir("/dev").map_or(0, |entries| {
        let names = entries.filter_map(Result::ok).filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| is_gpu(name)).count()
    });
    let files = u32::try_from(files).unwrap_or(0);
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => files.min(visible(&list)),
        Err(_) => files,
    }
}

fn is_gpu(name: &str) -> bool {
    name.strip_prefix("nvidia").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Number of entries before the first invalid one, as CUDA reads the list.
fn visible(list: &str) -> u32 {
    let valid = |entry: &&str| !entry.is_empty() && !entry.starts_with('-');
    list.split(',').map(str::trim).take_while(valid).count() as u32
}

/// The kernels' sizes for the source ranks of a group of this shape, with a model of at most `experts` experts per layer.
#[must_use]
pub fn kernel_shape(shape: &GroupShape, experts: usize) -> Shape {
    Shape {
        ranks: shape.sources,
        max_tokens: shape.max_tokens_per_rank as u32,
        hidden: shape.hidden.next_multiple_of(ROW_UNIT) as u32,
        top_k: shape.max_top_k as u32,
        experts: experts as u32,
    }
}

/// Bytes of one rank's window, all slots included.
#[must_use]
pub fn window_bytes(shape: &GroupShape, experts: usize) -> usize {
    let (_, bytes) = WindowLayout::new(&kernel_shape(shape, experts));
    usize::try_from(bytes).unwrap_or(usize::MAX).saturating_mul(shape.slots as usize)
}

/// Checks whether GPU ranks support the model.
///
/// # Errors
/// The first unsupported layer and the reason.
pub fn check(spec: &ModelSpec, shape: &GroupShape) -> Result<(), String> {
    kernel_shape(shape, spec.max_experts()).check().map_err(|error| format!("device cuda: {error}"))?;
    for (layer, moe) in spec.moe_layers() {
        if let Some(what) = unsupported(moe) {
            return Err(format!(
                "device cuda: layer {layer} {what}, which GPU ranks do not support; use --device cpu"
            ));
        }
    }
    Ok(())
}

/// Checks that no layer's experts need FP8 products, which the portable kernels do not have.
///
/// # Errors
/// The first layer whose experts do.
pub fn check_portable(spec: &ModelSpec, products: Fp8Products) -> Result<(), String> {
    for (layer, moe) in spec.moe_layers() {
        let shared = moe.shared.as_ref().map(Stored::shared);
        for stored in [Some(Stored::routed(&moe.experts)), shared].into_iter().flatten() {
            if stored.on_device(products).has_fp8_rows() {
                return Err(format!(
                    "the experts of layer {layer} would be held as: {}; the portable kernels multiply in bf16; \
                     use --fp8-compute bf16 and --mxfp4-compute bf16",
                    stored.explain(products)
                ));
            }
        }
    }
    Ok(())
}

/// Checks whether the portable kernels can divide the rows of the largest step. [`check_portable`] checks the formats.
///
/// # Errors
/// The number of rows and the limit.
pub fn check_portable_sizes(shape: &Shape) -> Result<(), String> {
    let (rows, local) = (panel_rows(shape), shape.max_local_experts() as usize);
    if rows / PORTABLE_TILE_ROWS + local <= PORTABLE_MOST_TILES {
        return Ok(());
    }
    Err(format!(
        "device cuda: a step can bring {} pairs of row and expert to a rank, which the portable kernels compute in at most \
         {PORTABLE_MOST_TILES} tiles of {PORTABLE_TILE_ROWS} rows; lower max-tokens-per-step",
        shape.max_assignments()
    ))
}

/// Rows of the experts' workspace. Each expert's rows start at a multiple of 8; routed and shared experts use the same workspace.
pub(crate) fn panel_rows(shape: &Shape) -> usize {
    let rows = |assignments: usize, experts: usize| (assignments + 7 * experts).next_multiple_of(8);
    let routed = rows(shape.max_assignments(), shape.max_local_experts() as usize);
    routed.max(rows(shape.max_tokens as usize, 1))
}

fn unsupported(moe: &MoeLayer) -> Option<String> {
    if moe.experts.count > MAX_EXPERTS {
        return Some(format!("has {} experts (supported: at most {MAX_EXPERTS})", moe.experts.count));
    }
    if let Some(groups) = moe.gate.groups.filter(|groups| groups.groups > 32) {
        return Some(format!("chooses among {} groups of experts (supported: at most 32)", groups.groups));
    }
    None
}

/// The result of checking one requirement of GPU ranks, for people.
#[derive(Clone, Debug)]
pub struct Check {
    /// Name of the requirement.
    pub name: String,
    /// State of the machine.
    pub found: String,
    /// Required state.
    pub needed: String,
    /// Whether the requirement is met.
    pub ok: bool,
    /// Whether ranks also run if it is not met.
    pub optional: bool,
    /// What to do if it is not met.
    pub way_out: String,
}

impl Check {
    /// A required check.
    #[must_use]
    pub fn new(name: &str, ok: bool, found: String, needed: &str) -> Self {
        let (name, needed) = (name.to_owned(), needed.to_owned());
        Check { name, found, needed, ok, optional: false, way_out: String::new() }
    }

    /// A required check that failed.
    #[must_use]
    pub fn failed(name: &str, found: String, needed: &str, way_out: &str) -> Self {
        Check::new(name, false, found, needed).way_out(way_out)
    }

    /// Sets what to do if the requirement is not met.
    #[must_use]
    pub fn way_out(mut self, text: &str) -> Self {
        text.clone_into(&mut self.way_out);
        self
    }

    /// Makes the requirement optional.
    #[must_use]
    pub fn optional(mut self) -> Self {
        self.optional = true;
        self
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn numa_nodes_are_in_the_order_of_pci_addresses() {
        let folder = tempfile::tempdir().unwrap();
        let (driver, devices) = (folder.path().join("gpus"), folder.path().join("devices"));
        for (address, node) in [("0000:9A:00.0", "1\n"), ("0000:1b:00.0", "0\n"), ("0000:b0:00.0", "-1\n")] {
            std::fs::create_dir_all(driver.join(address)).unwrap();
            let device = devices.join(address.to_lowercase());
            std::fs::create_dir_all(&device).unwrap();
            std::fs::write(device.join("numa_node"), node).unwrap();
        }
        std::fs::create_dir_all(driver.join("0000:c0:00.0")).unwrap();
        assert_eq!(nodes_by_address(&driver, &devices), [Some(0), Some(1), None, None]);
        assert!(nodes_by_address(folder.path().join("none").as_path(), &devices).is_empty());
    }

    #[test]
    fn gpus_are_numbered_among_the_visible_ones() {
        assert_eq!((ordinal(0, None), ordinal(3, None)), (Some(0), Some(3)));
        assert_eq!((ordinal(0, Some("2, 5")), ordinal(1, Some("2, 5"))), (Some(2), Some(5)));
        assert_eq!((ordinal(2, Some("2,5")), ordinal(0, Some("GPU-8932f937"))), (None, None));
    }

    #[test]
    fn nccl_may_share_a_gpu_only_if_ranks_do() {
        let allowed = |gpus: &[u32]| {
            environment(gpus).contains(&("NCCL_MULTI_RANK_GPU_ENABLE".to_owned(), "1".to_owned()))
        };
        assert!(allowed(&[0, 0]) && allowed(&[0, 1, 2, 1]));
        assert!(!allowed(&[0]) && !allowed(&[0, 1, 2, 3]) && !allowed(&[]));
    }

    #[test]
    fn device_files_and_visible_devices_are_counted() {
        assert!(is_gpu("nvidia0") && is_gpu("nvidia12"));
        assert!(!is_gpu("nvidiactl") && !is_gpu("nvidia-uvm") && !is_gpu("nvidia") && !is_gpu("sda"));
        assert_eq!(visible("0,1,3"), 3);
        assert_eq!(visible("2, GPU-8932f937"), 2);
        assert_eq!(visible(""), 0);
        assert_eq!(visible("0,-1,2"), 1);
    }

    #[test]
    fn the_portable_kernels_have_a_largest_step() {
        let shape = |max_tokens| Shape { ranks: 1, max_tokens, hidden: 64, top_k: 8, experts: 128 };
        for (tokens, fits) in [(1_046_415, true), (1_046_416, false)] {
            assert_eq!(check_portable_sizes(&shape(tokens)).is_ok(), fits, "{tokens}");
        }
        let refused = check_portable_sizes(&shape(2 << 20)).unwrap_err();
        assert!(
            refused.contains("16777216 pairs") && refused.contains("lower max-tokens-per-step"),
            "{refused}"
        );
    }

    #[test]
    fn rows_are_padded_to_the_kernels_row_unit() {
        let shape = GroupShape {
            ranks: 2,
            sources: 2,
            slots: 3,
            max_tokens_per_rank: 10,
            max_segments: 10,
            hidden: 100,
            max_top_k: 4,
        };
        let kernels = kernel_shape(&shape, 7);
        assert_eq!((kernels.hidden, kernels.top_k, kernels.experts), (128, 4, 7));
        let (_, one) = WindowLayout::new(&kernels);
        assert_eq!(window_bytes(&shape, 7), 3 * one as usize);
    }
}
