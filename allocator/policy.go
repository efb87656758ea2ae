// Package allocator chooses the best devices for a container. It has only pure functions on a gpu.Snapshot.
//
// GPUs are made from a snapshot, and a Pool from the devices of a resource. Both are immutable and safe for concurrent
// use. Choosing needs no driver calls, files or locks.
//
// # Scores
//
// Each pair of GPUs a and b has a score s(a,b). The better the two are connected, the higher it is: see Weights. The
// score of a set of GPUs is the sum over its pairs, S(X) = Σ s(a,b) over all {a,b} ⊆ X. In the formulas A are the
// available GPUs, M ⊆ A those that must be included, k is the requested size, and X ranges over the sets M ⊆ X ⊆ A of
// k GPUs.
//
// The comment on each Policy has its objective as a formula.
//
// The package imports only the package gpu of this project. It does not know the kubelet.
package allocator

// Policy is the objective by which devices are chosen. An objective has parts in order of importance: a later part
// only decides between sets for which all earlier parts are equal. The last part of each policy is the order of the
// GPUs: of two sets, the better one has the first GPU that is in only one of them.
type Policy string

const (
	// Topology maximises S(X), then L(A \ X), then S(A \ X). L is what the next requests could get of the rest:
	//
	//	L(R) = max{Σ s(p) over disjoint pairs p ⊆ R} + Σ max{S(Y) : Y ⊆ R, |Y| = j} over j = 4, 8 with j ≤ |R|
	//
	// So GPUs come from an island of NVLinks that is already broken, and whole islands stay whole.
	//
	// On hosts of up to MaxExact GPUs every set is compared. On larger hosts the search is greedy: a set grows from
	// each GPU, each time by the GPU with the highest score with the set, and the best of these sets is the answer.
	// For two GPUs the answer is optimal, for more it may not be, and L is not considered.
	Topology Policy = "topology"
	// Partition maximises Σ S(P) over the sets P of a partition of A into sets of k GPUs, one of which contains M. If
	// k does not divide |A|, one set is smaller. X is the set of k GPUs in that partition that contains M and has the
	// highest S(X). Of equal partitions the first in order counts, and likewise of equal sets. This is the best-effort
	// policy of NVIDIA's go-gpuallocator, with the same answers, except that X is never the smaller set.
	//
	// On hosts of more than MaxExact GPUs it is the same as Topology.
	Partition Policy = "partition"
	// NUMA minimises the number of NUMA nodes with a GPU of X, then applies Topology. GPUs whose NUMA node is unknown
	// count as one more node.
	NUMA Policy = "numa"
	// Spread takes devices of the GPUs with the fewest devices in use. For each GPU g, u(g) devices are not available
	// and x(g) devices are taken. G are the GPUs with x(g) > 0. Spread minimises
	//
	//	MIG devices:  Σ (u(g) + x(g))², then maximises |G|
	//	replicas:     Σ x(g)², then Σ u(g)·x(g)
	//
	// and then applies Topology to G. So a GPU is in an answer twice only if no other GPU has a replica. For whole
	// GPUs Spread is the same as Topology.
	Spread Policy = "spread"
	// Pack takes devices of the fullest GPUs that still have enough, so that whole GPUs stay whole. For each GPU g,
	// f(g) devices are available, and c(g) compute slices are in use by MIG devices of all profiles. Pack
	//
	//	MIG devices:  minimises |G|, then maximises Σ c(g) over G, then minimises Σ f(g) over G, then maximises S(G),
	//	              then minimises Σ f(g)·x(g)
	//	replicas:     minimises Σ x(g)², then maximises Σ u(g)·x(g), then is Topology for G
	//
	// For whole GPUs Pack is the same as Topology. On hosts of more than MaxExact GPUs, MIG devices of several GPUs
	// are packed one GPU at a time: |G| is minimal, the rest may not be optimal.
	Pack Policy = "pack"
)

// Policies returns the names of all policies.
func Policies() []string {
	return []string{string(Topology), string(Partition), string(NUMA), string(Spread), string(Pack)}
}
