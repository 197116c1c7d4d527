//! Memory and waits of candle's Metal device. What is wrong there and what this crate does about it: the table in `metal.rs`.

use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor};

use crate::error::Result;

/// Runs `f` in an autorelease pool of its own. Without one, what candle's calls autorelease lives as long as the thread.
pub(crate) fn pooled<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(feature = "metal")]
    return objc2::rc::autoreleasepool(|_| f());
    #[cfg(not(feature = "metal"))]
    f()
}

/// Ends a phase (a prompt is read, a text has ended): waits for the device, which reports what failed on it, and lets go of
/// buffers that nobody uses.
pub(crate) fn settle(device: &Device) -> Result<()> {
    if let Device::Metal(_) = device {
        device.synchronize()?;
    }
    Ok(())
}

/// `x` on `device` for good, contiguous and in no more memory than it has elements: uploads keep their size, while what is made
/// on the device is rounded up to a power of two.
pub(crate) fn place(x: &Tensor, device: &Device) -> Result<Tensor> {
    let lies_alone = x.is_contiguous() && stored(x).is_none_or(|n| n == x.elem_count());
    let x = match lies_alone {
        true => x.clone(),
        // candle uploads a view's whole storage.
        false => x.force_contiguous()?,
    };
    Ok(pooled(|| x.to_device(device))?)
}

/// Zeros as [`place`] would have them.
pub(crate) fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    match device {
        Device::Metal(_) => place(&Tensor::zeros(shape, dtype, &Device::Cpu)?, device),
        _ => Ok(Tensor::zeros(shape, dtype, device)?),
    }
}

/// Contiguous tensors of one width, one below the other, as [`place`] would have them.
pub(crate) fn stack_rows(parts: &[&Tensor]) -> Result<Tensor> {
    let Some(Device::Metal(_)) = parts.first().map(|p| p.device()) else {
        return Ok(Tensor::cat(parts, 0)?);
    };
    let rows = parts.iter().map(|p| p.dims()[0]).sum();
    let mut dims = parts[0].dims().to_vec();
    dims[0] = rows;
    let all = zeros(dims, parts[0].dtype(), parts[0].device())?;
    let mut at = 0;
    for part in parts {
        all.slice_set(part, 0, at)?;
        at += part.dims()[0];
    }
    Ok(all)
}

/// Elements of the storage behind a CPU tensor.
fn stored(x: &Tensor) -> Option<usize> {
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => Some(v.len()),
        Storage::Cpu(CpuStorage::BF16(v)) => Some(v.len()),
        Storage::Cpu(CpuStorage::F16(v)) => Some(v.len()),
        Storage::Cpu(CpuStorage::U32(v)) => Some(v.len()),
        Storage::Cpu(_) => Some(usize::MAX),
        // A view of somebody's tensor that is on a device already stays one, if kernels can load from its start.
        _ if layout.start_offset() == 0 => None,
        _ => Some(usize::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placed_tensors_hold_nothing_but_themselves() {
        let cpu = &Device::Cpu;
        let x = Tensor::arange(0f32, 24.0, cpu).unwrap().reshape((6, 4));
        let x = x.unwrap();
        let views = [
            x.narrow(0, 2, 3).unwrap(),
            x.narrow(0, 0, 2).unwrap(),
            x.t().unwrap(),
            x.to_dtype(DType::I64).unwrap().narrow(0, 1, 1).unwrap(),
        ];
        for view in views {
            let placed = place(&view, cpu).unwrap();
            assert!(placed.is_contiguous());
            let all = placed.storage_and_layout().0;
            let Storage::Cpu(all) = &*all else { panic!() };
            let len = match all {
                CpuStorage::F32(v) => v.len(),
                CpuStorage::I64(v) => v.len(),
                _ => panic!(),
            };
            assert_eq!(len, view.elem_count());
            let numbers = |t: &Tensor| t.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
            assert_eq!(numbers(&placed), numbers(&view));
        }
        // A whole tensor is not copied.
        let same = place(&x, cpu).unwrap();
        let at = |t: &Tensor| match &*t.storage_and_layout().0 {
            Storage::Cpu(CpuStorage::F32(v)) => v.as_ptr(),
            _ => panic!(),
        };
        assert_eq!(at(&same), at(&x));
    }
}
