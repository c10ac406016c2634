"""Tuning constants: sizes of buffers, and the crossovers between exact ways to compute the same numbers.

No constant changes a result by more than rounding, except those of the last section. Each comment says what the number
bounds; where a measurement chose it, the comment names what was measured. Modules read `tuning.NAME` when they compute,
so that a test can set a constant.
"""

MIB = 2**20

# --- memory checks

ASSUMED_FREE_BYTES = MIB // 4  # smaller needs are not compared with the free memory, whose reading takes 0.2 ms

BUFFERED_BYTES, MOST_BUFFERS = 2048 * MIB, 16  # a GPU's buffers grow by its memory over the first, up to the second

# --- Jacobian pass

WORKING_SET_BYTES = 128 * MIB  # all output gradients of a batch
GRADIENT_BYTES = 32 * MIB  # one output gradient; larger allocations bypass the allocator's cache
ROOT_COPIES = 3  # copies of a batch's root S: as computed, in the network's type, as output gradients
FORWARD_FACTOR = 8  # examples of a forward pass without a graph, relative to a pass with one
MOST_CHECKED, FEWEST_CHECKED = 64, 4  # examples of a batch in the gradient check; an eighth of the batch between them
LONG_GRADIENT = 16  # gradient of a convolution over one row, in length: from here on rows take one cotangent at a time
WIDEST_FUSED_LAYER = 1024  # outputs of a layer, up to which gradients are summed per cotangent

# --- storage of rows: work and memory of written-out rows against those of factors

ROWS_OVER_FACTORS = 8  # most memory of written-out rows, relative to that of the factors
ROWS_OVER_FACTORS_FEW_POSITIONS = 2  # the same for at most FEW_POSITIONS positions
FEW_POSITIONS = 64
SEPARATE_MATRIX_ENTRIES = 512  # entries from which a parameter's rows get a separate matrix product

# --- contractions and Gram matrices

TILE_ROWS = 1024  # rows of a tile whose buffers fit in cache
TILE_DEVICE_ROWS = 4096  # the same on an accelerator, where few large products are faster
FEWEST_TILE_ROWS = 160  # with fewer rows, a product of long rows is slow, and tiles cost more than symmetry saves
TILE_BYTES = 96 * MIB  # buffers of a tile that contracts shared positions
PANEL_COLUMNS = 4096  # columns of a layer's rows that are written out at a time
INNER_SUMS_BYTES = 2 * MIB  # inner sums over positions that fit in a core's cache
INNER_SUMS_DEVICE_BYTES = 64 * MIB  # the same on an accelerator, where few large products are faster

PRODUCT_COLUMNS = 4096  # columns of a product of layer inputs with several vectors
FACTOR_BYTES = 4 * MIB  # such products at a time: in cache the product with output gradients takes 0.2 to 1 of the time
WRITTEN_VECTORS = 16  # products with rows that take as long as writing them out; 16 to 110 on two cores, by their size

# --- curvature

WRITTEN_BYTES = 64 * MIB  # rows of a parameter block that are written out at a time
SQUARED_INPUT_BYTES = 2 * MIB  # layer inputs that are squared at a time, in cache
LARGEST_SHARED_PRODUCT = 1024  # columns of a product that a bias's block and a weight's factor share
COVARIANCE_BYTES = 192 * MIB  # cross-covariances with the training points at a time
FULL_ROWS_BYTES = 256 * MIB  # dense rows at a time, structure "full"
OUTPUTS_BYTES = 128 * MIB  # matrices of some outputs of a last layer at a time
LAST_LAYER_SPECTRUM = 4096  # rows of B up to which a last layer lists eigenvalues; else one factorization per setting
HESSIAN_BYTES = 64 * MIB  # output Hessians of examples that are looked at or compared at a time
BLOCK_REFRESH = 0.05  # steps of variational inference, in units of step size, between two eigendecompositions
BLOCK_CHANGE = 0.05  # relative change of a block's trace that makes its decomposition anew due earlier
INPUTS_WITH_PRECISIONS = 1_024  # features up to which estimators learn one precision for each
# features above which the estimators' perceptron has a linear part, and from which on both are tried of fewer examples
# for each feature: examples/predictions/wide.py
INPUTS_WITHOUT_LINEAR, INPUTS_EITHER_WAY, EXAMPLES_OF_EACH_INPUT = 64, 16, 10
# of piecewise linear features of the estimators' perceptron: how many of each feature, and up to how many features and
# examples a perceptron with them is tried: examples/predictions/pieces.py
PIECES, INPUTS_IN_PIECES, EXAMPLES_IN_PIECES = 8, 40, 3_000
# steps of an estimator's training from which it has fewer epochs, and the fewest; examples up to which a classifier's
# perceptron has one hidden layer: examples/predictions/large.py
TRAINING_STEPS, FEWEST_EPOCHS, EXAMPLES_OF_ONE_LAYER = 20_000, 10, 5_000
LEFT_OUT_ERRORS = 20_000  # points whose errors tell the estimators of tails; all took a quarter of a fit of 300,000
STEP_MATRIX = 2_000  # parameters up to which H at other precisions is factored beside the posterior's own
EIGENVALUES = 65536  # eigenvalues in one piece of the evidence's graph

# --- linear algebra

PANEL_ROWS = 768  # rows of a panel of a symmetric matrix: the diagonal blocks are stored and multiplied whole
PANEL_DEVICE_ROWS = 4096  # the same on an accelerator, where few large products are faster
SOLVE_ROWS = 256  # rows of a panel at a time, where a solve or a product copies them
LARGEST_SPECTRUM = 20_000  # rows of a matrix whose eigenvalues are computed: cuSOLVER's routine ends near 25,000
DEALT_ROWS = 384  # rows of B that are dealt to one of several processes at a time: fewer are slower, more deal unevenly
DEALT_ROWS_DEVICE = 2048  # the same on an accelerator
FEWEST_DEALT_ROWS = 16  # the same of a small B, where more blocks would only be more messages
INVERSE_COLUMNS = 1024  # columns of an inverse at a time: wide panels are half zeros and take memory

# --- predictions and explanations

FORWARD_EXAMPLES = 2048  # examples in one forward pass without a graph
PREDICTED_EXAMPLES = 512  # inputs of a prediction that are read together, by default
CHUNK_BYTES = 16 * MIB  # rows of a chunk of predictions with all that follows; 32 MiB is no faster
FEWEST_CHUNK_EXAMPLES = 16  # examples in the first chunk, at least; they show the size of a row
SAMPLED_OUTPUTS = 2**23  # outputs at weight samples at a time
AVERAGED_OUTPUTS = 2**19  # entries of f at a time while a predictive is averaged: 4 MiB in float64, which caches take
NEIGHBOR_POINTS = 5_000  # training points whose neighbors are looked for: the distances of all pairs are computed
SEARCHED_OUTPUTS = 2**17  # entries of f in one evaluation of a calibration's search
POSITION_OUTPUTS = 2**8  # outputs at all positions above which a predictive draws f, and writes no rows of J
POSITION_BLOCK = 64  # outputs of neighboring positions whose covariance is computed together
MIXTURE_OUTPUTS = 2**22  # entries of f at a time in the mean of a mixture
WEIGHT_SAMPLE_BYTES = 256 * MIB  # weight samples at a time
# inputs of the pool at which active learning wants to predict: so many at least, and more for so many covariances
TARGETS_OF_POOL, TARGET_COVARIANCES = 100, 2**22
EXPLAINED_BYTES = 512 * MIB  # rows of the explained inputs that share a pass over the training data
DIRECTION_BYTES = 512 * MIB  # directions U of the ranked inputs that share a pass over the training data
DRAWN_NUMBERS = 2**25  # random numbers at a time, leave-one-out
KEPT_ROWS_BYTES = 512 * MIB  # rows of the training points that are kept between passes, leave-one-out of some
GP_ROWS_BYTES = 128 * MIB  # dense rows at a time in gradients of a GPyTorch kernel
GP_CACHED_INPUTS = 4  # inputs whose rows a kernel keeps: training and test data of two cross-validation folds

# --- evidence by sampling

CHAIN_BYTES = 256 * MIB  # what autograd keeps of a pass at several weights, at a time
CACHED_BYTES = 32 * MIB  # the same on a processor, where a pass of more weights leaves its caches
GRAPH_FACTOR = 2  # bytes at the peak of a pass with its gradient, relative to what autograd keeps
CHOSEN_SHARE = 0.75  # share of the examples that count, above which a network reads all of them
DENSE_METRIC = 2048  # parameters up to which a posterior precision is written out to precondition chains
SLICED_OUTPUTS = 20_000  # outputs N C up to which the linearized model is sampled as f; more are sampled as weights

# --- training to an optimum

HELD_BYTES = 1024 * MIB  # inputs kept in memory between passes over the data
LBFGS_PAIRS = 50  # steps that L-BFGS remembers, at most; with 20 a smooth network takes up to twice as many passes
LBFGS_BYTES, FEWEST_PAIRS = 1024 * MIB, 20  # of their memory, which large networks may exceed with so many steps
STEPS_A_PAIR = 8  # steps allowed for each step remembered: few steps gain nothing from a long memory
FULL_BATCH_EXAMPLES = 8192  # examples above which the training to an optimum begins with minibatches
MINIBATCH = 128  # examples of a minibatch
ANNEALING_STEPS = 500  # minibatch steps before L-BFGS, or where it finds no decrease, at least
RETRAINING_STEPS = 1000  # minibatch steps between evaluations of the evidence when a network is retrained, in all

# --- products alone: structure "iterative"

FIRST_RANK = 128  # test vectors of the first sketch; it is doubled from there
FIRST_LEADING = 1024  # rows of the first factorization of leading rows
LEADING_SHARE = 0.8  # share of the trace of JᵀΛJ that the first leading rows must have
ROWS_PER_LEADING = 8  # rows of SᵀJ for each leading row, at least; with fewer, test vectors find more
POWER_STEPS = 8  # power iterations for the largest eigenvalue of leading rows
FIRST_PROBES, MOST_PROBES = 16, 128  # probes of a log determinant
LANCZOS_PROBES = 8  # probes at a time: each keeps a vector of every step, and all share products
LANCZOS_STEPS = 60  # products with each probe, at most
QUADRATURE_SHARE = 0.1  # width of a quadrature's bracket over the wished standard error
CONJUGATE_GRADIENT_STEPS = 2000  # products of a solve, at most; more raise an error
REMAINDER_DRAWS = 64  # draws of what the low rank leaves of H⁻¹, at least
MOST_DRAWS = 800  # draws of the posterior for the evidence's gradient, at most
LOW_RANK_VARIANCE_ERROR = 0.05  # relative error of V by a low rank, where draws alone are coarser
DRAWS_PER_OUTPUT = 4  # draws of the posterior for each output, at least, where V is their mean
DRAW_PRODUCTS = 8  # products that a draw is expected to take
COMPLETE = 1e-7  # trace left by the low rank, below which covariances are those of the low rank
LEFT_SHARE = 0.05  # share of log det B that the low rank of covariances leaves, at most
LOCAL_BYTES = 1024 * MIB  # matrices of the prior groups in a local model of log det B
EFFECTIVE_ERROR = 0.01  # relative standard error of the effective parameters of a prior group, if 64 draws give it
DRAW_ERROR = 0.003  # error of the solve for a draw, in the norm of H; 0.01 moves variances of MNIST by 0.2 % (rms)
ANCHORS = 12  # local models in one search for hyperparameters, at most
ANCHOR_MOVE = 0.01  # change of a log hyperparameter between two local models, below which the search has converged
MEASURED_POINTS = 100  # training points at which the variances of a compressed posterior are measured
MEASURING_PROBES = 4  # probes that measure what a larger sketch leaves
PRODUCT_VECTORS, FEWEST_PRODUCT_VECTORS = 128, 16  # vectors that share a product with rows; fewer are slower each
PRODUCT_BYTES = 64 * MIB  # vectors of such a product, and tiles in which rows are turned
FACTOR_TESTS = 8  # test vectors of a Kronecker factor beyond its rank, at least
OVERSAMPLING = 1.25  # test vectors of a low rank that is kept alone, relative to its rank

# --- forecasts: what a probe computes

# operations of an exact matrix that "auto" takes on a CPU (minutes on two cores) and on a device, and how many
# times less another structure has to take: its operations are slower
EXACT_OPERATIONS, EXACT_OPERATIONS_DEVICE, FASTER = 3e13, 3e15, 10.0
# operations of function space from which a fit tells that weight space takes a small part (half a minute on a core)
LONG_OPERATIONS, LONG_OPERATIONS_DEVICE = 1e12, 1e14
PROBED_EXAMPLES = 256  # examples whose rows are timed
PROBED_ROWS = 512  # rows of SᵀJ, whose eigenvalues are extrapolated
PROBED_GRAM_ROWS = 2048  # rows of SᵀJ, from which leading rows are extrapolated
PROBED_ORDER, PROBED_ORDER_DEVICE = 1024, 8192  # order of the matrices whose algebra is timed

# --- limits that a user can notice

MISSED = 1.25  # error of an evidence over the wished one, above which a warning is issued
EVIDENCE_FALL = 0.1  # nats a point of evidence that training to an optimum loses, above which a warning is issued

PROGRESS_DELAY = 0.5  # seconds of a pass or of predictions after which a progress bar appears on a terminal
LARGEST_EXACT_BLOCK = 1024  # entries of a tensor that gets an exact block; larger ones keep their exact diagonal
NEWTON_STEPS = 100  # steps to the optimum of a what-if; if that is not enough, a warning says so
LINEAR_STEPS = 10  # of these, after which changes of the gradient correct their curvature: they converge linearly
QUASI_NEWTON_STEPS = 1000  # gradients in a descent before Newton steps follow; networks with kinks may get there
MOST_QUASI_NEWTON_STEPS = 3000  # the same far from a minimum: where a stretch of the descent falls by so many nats
# gradients of a stretch, after which a new preconditioner is worth its cost: 100 to 200 take the same time
STRETCH, STRETCH_FALL = 200, 0.01
FEWEST_VECTORS, MOST_VECTORS = 10, 128  # vectors that a descent remembers; twice as many spare 3 % of the steps
DESCENT_BYTES = 256 * MIB  # remembered vectors of all networks that share passes
SINGLE_BYTES = 4 * MIB  # of these, above which they are in single precision until the descent ends
DEFLATION = 64  # products with an exact Hessian that correct the preconditioner of all what-ifs, at most
WRITTEN_PER_GROUP = 32  # parameters for each group, up to which that Hessian is written out: it spares 30 steps a group
HALVINGS = 40  # halvings of a step in a line search; after them it counts as refused
NEWTON_PRODUCTS = 250  # products with an exact Hessian in one Newton step; the direction found so far is taken then
DESCENT_PRODUCTS = 2000  # the same in all Newton steps of a descent; few that converge need more
VALLEY, VALLEY_STEPS = 0.02, (20, 100)  # curvature along a valley over the prior precision, and steps that show it
VALLEY_GAIN = 1e-5  # gain of a step along it, relative to the objective, at most; in float32 the root of rounding
VALLEY_OUTCOME = 0.01  # change of the outcome along a step, squared, over its square in the prior precision, at most
VALLEY_SHIFT = 0.03  # share of the prior precision that Newton steps to its ground add
VALLEY_SETTLES = 0.25  # share of the outcome's change, squared, that each of them leaves; else it is no valley
VALLEY_CONCAVE = 1e-3  # negative curvature over the prior precision, beyond which its ground is a saddle
GRAPH_GROUPS = 8  # networks of what-ifs that share a graph of second derivatives
GROUPS = 128  # networks of what-ifs that share passes, at most
LEAST_CURVATURE = 1e-10  # curvature along a direction, relative to the fit's, below which it counts as none
AUTOSAVE_SECONDS = 60.0  # seconds of work that may be lost
SNAPSHOT_SECONDS, SNAPSHOT_SHARE = 1.0, 20  # work that an interruption may lose: in seconds, and in times of a copy
LEFT_OUT_SHARE = 0.1  # share of the data that is left out together, at most
LEFT_OUT_PASSES = 30  # passes to the means without a group; 100 move densities by 0.05 nats at most
LEFT_OUT_ACCURACY = 0.01  # share of a Newton step in a pass, below which it is the last
