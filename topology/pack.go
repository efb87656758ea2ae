package topology

// pack divides units of some sizes into runs, in order: as few as a limit for a run's size allows, and as even as that
// leaves. It returns where each run ends. A unit above the limit has a run of its own.
func pack(sizes []int, limit int) []int {
	ends := greedy(sizes, limit)
	for l := 1; l < limit; l++ {
		if even := greedy(sizes, l); len(even) == len(ends) {
			return even
		}
	}
	return ends
}

func greedy(sizes []int, limit int) []int {
	var ends []int
	sum := 0
	for i, size := range sizes {
		if i > 0 && sum+size > limit {
			ends = append(ends, i)
			sum = 0
		}
		sum += size
	}
	if len(sizes) > 0 {
		ends = append(ends, len(sizes))
	}
	return ends
}

// units takes a group apart until no part is above the limit.
func (g *group) units(limit int) []*group {
	if len(g.gpus) <= limit {
		return []*group{g}
	}
	var parts []*group
	for _, c := range g.children {
		parts = append(parts, c.units(limit)...)
	}
	return parts
}

// lines divides a NUMA node's GPUs into lines of at most that many.
func (g *group) lines(limit int) [][]int {
	parts := g.units(limit)
	var lines [][]int
	start := 0
	for _, end := range pack(lengths(parts), limit) {
		var line []int
		for _, p := range parts[start:end] {
			line = append(line, p.gpus...)
		}
		lines = append(lines, line)
		start = end
	}
	return lines
}

// shelves puts NUMA nodes side by side as long as a line has room for all their GPUs.
func shelves(groups []*group, limit int) [][]*group {
	var rows [][]*group
	start := 0
	for _, end := range pack(lengths(groups), limit) {
		rows = append(rows, groups[start:end])
		start = end
	}
	return rows
}

func lengths(groups []*group) []int {
	sizes := make([]int, len(groups))
	for i, g := range groups {
		sizes[i] = len(g.gpus)
	}
	return sizes
}
