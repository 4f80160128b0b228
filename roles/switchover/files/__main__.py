"""`python3 -I <rollout_root>/program VERB`: the package beside this file is module_utils/dflash_rollout, copied."""

import sys

from dflash_rollout.program import main

sys.exit(main())
