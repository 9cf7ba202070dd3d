"""Keys and values in pages, and in rows of their own, on any device."""

import torch
from torch import Tensor


def gathered(pages: Tensor, block_table: Tensor, seqused_k: Tensor) -> Tensor:
    """Return the rows (B, entries · page_size, Hk, D) of pages (pages, page_size, Hk, D).

    Zeros where a sequence has no page in use, or one of a number that there is not.
    """
    count, page_size = pages.shape[:2]
    batch, entries = block_table.shape
    shape = batch, entries * page_size, *pages.shape[2:]
    if not (count and page_size and entries and batch):
        return pages.new_zeros(shape)
    begins = torch.arange(entries, device=pages.device) * page_size
    in_use = begins < seqused_k[:, None]
    there = in_use & (block_table >= 0) & (block_table < count)
    found = pages[block_table.masked_fill(~there, 0).long()]
    return found.masked_fill(~there[:, :, None, None, None], 0).reshape(shape)


def in_pages(
    k: Tensor, v: Tensor, page_size: int, ends: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return k, v and a block_table that hold the rows of k and v (B, Sk, Hk, D) up to `ends` (B).

    Pages are in any order, and NaN where no row is; entries behind the last page in use are of any
    number. K's lie row after row, V's head after head, and the table in wider rows.
    """
    batch, seqlen_k = k.shape[:2]
    entries, device = -(-seqlen_k // page_size), k.device
    begins = torch.arange(entries, device=device) * page_size
    in_use = begins < ends[:, None]
    count = int(in_use.sum())
    order = torch.randperm(count + 3, generator=generator, device=device).int()
    numbers = torch.tensor([-1, 2**31 - 1, -(2**31), 1], dtype=torch.int32, device=device)
    table = numbers.repeat(batch * (entries + 5))[: batch * (entries + 5)].view(batch, entries + 5)
    table = table[:, 2 : 2 + entries]
    table[in_use] = order[:count]

    def paged(x: Tensor, *, heads_first: bool) -> Tensor:
        rows = x.new_full((batch, entries * page_size, *x.shape[2:]), torch.nan)
        rows[:, :seqlen_k] = x
        shape = (count + 3, page_size, *x.shape[2:])
        if heads_first:
            pool = x.new_full((shape[0], shape[2], page_size, shape[3]), torch.nan).transpose(1, 2)
        else:
            pool = x.new_full(shape, torch.nan)
        pool[order[:count].long()] = rows.view(batch, entries, *shape[1:])[in_use]
        return pool

    return {
        "k": paged(k, heads_first=False),
        "v": paged(v, heads_first=True),
        "block_table": table,
    }


def usual_pages(k: Tensor, v: Tensor, page_size: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return k and v as pages in any order, a block_table and seqused_k, without a copy.

    Where rows are no multiple of a page, one page is a sequence.
    """
    batch, seqlen_k = k.shape[:2]
    size = page_size if seqlen_k % page_size == 0 else seqlen_k
    entries = seqlen_k // size if size else 0
    pages = (x.reshape(batch * entries, size, *x.shape[2:]) for x in (k, v))
    generator = torch.Generator(device=k.device).manual_seed(0)
    order = torch.randperm(batch * entries, generator=generator, device=k.device)
    lengths = torch.full((batch,), seqlen_k, dtype=torch.int32, device=k.device)
    return *pages, order.int().view(batch, entries), lengths
