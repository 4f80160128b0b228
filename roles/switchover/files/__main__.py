"""`python3 -IB <rollout_root>/program VERB`; the package beside this file is a copy of the modules' own."""

import sys

from dflash_rollout.program import main

sys.exit(main())
